"""Compiled for GPUs that are not here, `ssm_nodes` works in place, in wide accesses and without spills.

What this does not cover: nothing runs, so neither numerics nor speed on the device are shown, and registers
are those of the `ptxas` that is installed. Tiles are those of real models: Mamba-2 states of 128 by 64,
delta rules' of 128 by 128.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.report.gpu import compile_report_gpu
from kernels_pallas.ssm_nodes import Inputs, NodesPlan, ssm_nodes

pytestmark = pytest.mark.aot

NUM_SLOTS, ROWS, HEADS, KEY_HEADS, STATE_DIM = 64, 8, 16, 4, 128


def report(target, kind, *, num_pending, num_nodes, precision="float32", dtype=jnp.float32):
    """The report of the kernel, of a program that copies nothing."""
    head_dim = 64 if kind == "mamba2" else 128

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def inputs(steps):
        if not steps:
            return None
        keys = shape(ROWS, steps, KEY_HEADS, STATE_DIM, dtype=jnp.bfloat16)
        v = shape(ROWS, steps, HEADS, head_dim, dtype=jnp.bfloat16)
        decay = shape(ROWS, steps, HEADS, *([STATE_DIM] if kind == "kda" else []))
        return Inputs(keys, keys, v, decay, None if kind == "mamba2" else shape(ROWS, steps, HEADS))

    row = shape(ROWS, dtype=jnp.int32)
    plan = NodesPlan(row, row, row, row, row, shape(ROWS, num_nodes, dtype=jnp.int32), row)
    pool = shape(NUM_SLOTS, HEADS, STATE_DIM, head_dim, dtype=dtype)
    call = functools.partial(ssm_nodes, kind, precision=precision, implementation="triton")
    found = compile_report_gpu(call, (pool, inputs(num_pending), inputs(num_nodes), plan), (0,), target)
    (kernel,) = (kernel for kernel in found["kernels"] if "ssm_nodes" in kernel["name"])
    pool_bytes = pool.size * pool.dtype.itemsize
    # In place, and less room besides than one slot.
    assert found["alias_bytes"] >= pool_bytes
    assert found["temp_bytes"] < pool_bytes / NUM_SLOTS
    assert not found["copies"]
    return kernel


@pytest.mark.parametrize(
    ("target", "kind", "options"),
    [
        ("sm_100a", "mamba2", {"num_pending": 1, "num_nodes": 0}),
        ("sm_80", "kda", {"num_pending": 8, "num_nodes": 0, "dtype": jnp.bfloat16}),
        ("sm_100a", "kda", {"num_pending": 4, "num_nodes": 16, "precision": "fast"}),
        ("sm_90a", "gdn", {"num_pending": 4, "num_nodes": 16, "precision": "float32"}),
        ("sm_80", "gdn", {"num_pending": 4, "num_nodes": 16, "precision": "exact"}),
    ],
    ids=["decode", "fold", "fast", "float32", "exact"],
)
def test_states_stay_in_registers_and_move_in_128_bits(target, kind, options):
    kernel = report(target, kind, **options)
    assert kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    access = kernel["global_access"]
    # A thread's part of a state is loaded once, and stored in two places: written and tracked.
    head_dim = 64 if kind == "mamba2" else 128
    columns = 8 if options.get("precision") == "exact" else min(32, head_dim)
    item_bits = 16 if options.get("dtype") == jnp.bfloat16 else 32
    vectors = STATE_DIM * columns * item_bits // 128 // kernel["threads"]
    assert access["load.128"] >= vectors
    assert access["store.128"] >= 2 * vectors
