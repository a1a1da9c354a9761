"""`copy_slots` moves whole states in place and touches nothing else; the null slot reads as zero."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mambacache_jax.config import RecurrentSpec
from mambacache_jax.device import ssm_pool

SPECS = [RecurrentSpec("mamba2", 2, 4, 3, 5, 4), RecurrentSpec("kda", 1, 2, 2, 6, 3)]


@pytest.fixture
def pool():
    """Six slots; every number of slot i is i, and the null slot holds NaN."""
    empty = ssm_pool.make_ssm_pool(SPECS, 6, "float32", "float32")

    def mark(leaf):
        ids = jnp.arange(6, dtype=leaf.dtype).reshape((6,) + (1,) * (leaf.ndim - 1))
        marked = jnp.broadcast_to(ids, leaf.shape)
        return marked.at[0].set(jnp.nan) if leaf.dtype == jnp.float32 else marked

    return jax.tree.map(mark, empty)


def slot_ids(pool):
    """The one number each slot holds, the same in all leaves; the null slot is not looked at."""
    flat = [np.asarray(leaf)[1:].reshape(5, -1) for leaf in jax.tree.leaves(pool)]
    ids = np.concatenate(flat, axis=1)
    assert (ids == ids[:, :1]).all()
    return ids[:, 0].astype(int).tolist()


def test_padded_moves_touch_only_the_null_slot(pool):
    moved = ssm_pool.copy_slots(pool, jnp.array([3, 0, 0]), jnp.array([1, 0, 0]))
    assert slot_ids(moved) == [3, 2, 3, 4, 5]


def test_copying_the_null_slot_clears_a_slot_though_it_holds_nan(pool):
    moved = ssm_pool.copy_slots(pool, jnp.array([0]), jnp.array([4]))
    assert slot_ids(moved) == [1, 2, 3, 0, 5]


def test_several_moves_read_before_they_write(pool):
    moved = ssm_pool.copy_slots(pool, jnp.array([1, 1, 2]), jnp.array([3, 4, 5]))
    assert slot_ids(moved) == [1, 2, 1, 1, 2]


def test_a_copy_works_in_the_pools_own_buffers(pool):
    large = ssm_pool.make_ssm_pool([RecurrentSpec("gdn", 8, 64, 64, 256, 4)], 65, "float32", "float32")
    moves = jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = ssm_pool.copy_slots.lower(large, moves, moves).compile().memory_analysis()
    pool_bytes = sum(leaf.nbytes for leaf in large.state + large.conv)
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
    leaves = jax.tree.leaves(pool)
    ssm_pool.copy_slots(pool, jnp.array([1]), jnp.array([2]))
    assert all(leaf.is_deleted() for leaf in leaves)


def test_a_copy_is_compiled_once_for_a_number_of_moves(pool):
    chex.clear_trace_counter()
    copy = jax.jit(chex.assert_max_traces(ssm_pool.copy_slots.__wrapped__, n=1))
    for src, dst in ((1, 2), (3, 4), (5, 1)):
        copy(pool, jnp.array([src]), jnp.array([dst]))


def test_storage_rounds_to_the_pools_dtype():
    pool = ssm_pool.make_ssm_pool(SPECS, 3, "float32", "bfloat16")
    rows = jnp.full((1, 2, 4, 3), 1.001, jnp.float32)
    leaf = ssm_pool.write_slots(pool.state[0], jnp.array([2]), rows)
    assert leaf.dtype == jnp.bfloat16
    assert float(leaf[2, 0, 0, 0]) == 1.0
