"""`slot_copy` and `slot_clear` move whole slots of every array in place, and touch nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.slot_copy import slot_clear, slot_copy

IMPLEMENTATIONS = ("xla", "reference")


@pytest.fixture
def pools():
    """Three arrays of six slots; every number of slot i is i, and the null slot holds NaN."""
    ids = np.arange(6, dtype=np.float32)
    ids[0] = np.nan
    wide = np.broadcast_to(ids[:, None, None], (6, 3, 5))
    return {
        "state": jnp.asarray(wide),
        "conv": jnp.asarray(wide[:, :2], jnp.bfloat16),
        "stamp": jnp.arange(6, dtype=jnp.int32),
    }


def slot_ids(pools):
    """The one number each slot holds, the same in all arrays; the null slot is not looked at."""
    flat = [np.asarray(leaf)[1:].reshape(5, -1).astype(np.float32) for leaf in pools.values()]
    ids = np.concatenate(flat, axis=1)
    assert (ids == ids[:, :1]).all()
    return ids[:, 0].astype(int).tolist()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("src", "dst", "want"),
    [
        ([3, 0, 0], [1, 0, 0], [3, 2, 3, 4, 5]),
        ([0], [4], [1, 2, 3, 0, 5]),
        ([1, 1, 2], [3, 4, 5], [1, 2, 1, 1, 2]),
        ([], [], [1, 2, 3, 4, 5]),
    ],
    ids=["padded", "null slot", "shared source", "none"],
)
def test_whole_slots_move(pools, src, dst, want, implementation):
    src, dst = (jnp.asarray(x, jnp.int32) for x in (src, dst))
    assert slot_ids(slot_copy(pools, src, dst, implementation=implementation)) == want


def test_slots_are_cleared_and_no_others(pools):
    assert slot_ids(slot_clear(pools, jnp.array([2, 5, 0, 2], jnp.int32))) == [1, 0, 3, 4, 0]


@pytest.mark.parametrize("op", ["copy", "clear"])
def test_pools_keep_their_buffers(op):
    def run(pools, src, dst):
        return slot_copy(pools, src, dst) if op == "copy" else slot_clear(pools, dst)

    pools = [jax.ShapeDtypeStruct((65, 8, 32, 32), jnp.float32)] * 3
    moves = jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = jax.jit(run, donate_argnums=0).lower(pools, moves, moves).compile().memory_analysis()
    pool_bytes = 3 * 65 * 8 * 32 * 32 * 4
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8


def test_wrong_arguments_are_refused(pools):
    moves = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="unknown implementation 'dma'; there are xla, reference"):
        slot_copy(pools, moves, moves, implementation="dma")
    pools["stamp"] = pools["stamp"][:4]
    for call in (lambda: slot_copy(pools, moves, moves), lambda: slot_clear(pools, moves)):
        with pytest.raises(ValueError, match=r"one number of slots, got \[4, 6\]"):
            call()
