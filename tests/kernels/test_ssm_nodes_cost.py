"""In a program of many layers `ssm_nodes` works in the pools' own buffers, and keeps no state per node."""

import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.ssm_nodes import Inputs, NodesPlan, ssm_nodes

NUM_SLOTS, ROWS, HEADS, DIM, LAYERS = 513, 4, 2, 32, 2
STATE_BYTES = HEADS * DIM * DIM * 4


def compiled(kind, num_pending, num_nodes, precision):
    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def inputs(steps):
        if not steps:
            return None
        lead = ROWS, steps
        decay = shape(*lead, HEADS, DIM) if kind == "kda" else shape(*lead, HEADS)
        keys, beta = shape(*lead, 1, DIM), None if kind == "mamba2" else shape(*lead, HEADS)
        return Inputs(keys, keys, shape(*lead, HEADS, DIM), decay, beta)

    def layers(pools, pending, nodes, plan):
        outs = []
        for n, pool in enumerate(pools):
            pools[n], *out = ssm_nodes(kind, pool, pending, nodes, plan, precision=precision)
            outs.append(out)
        return pools, outs

    row = shape(ROWS, dtype=jnp.int32)
    plan = NodesPlan(row, row, row, row, row, shape(ROWS, num_nodes, dtype=jnp.int32), row)
    pools = [shape(NUM_SLOTS, HEADS, DIM, DIM)] * LAYERS
    call = jax.jit(layers, donate_argnums=0)
    return call.lower(pools, inputs(num_pending), inputs(num_nodes), plan).compile()


@pytest.mark.parametrize("num_pending", [0, 1, 4])
@pytest.mark.parametrize(("num_nodes", "precision"), [(0, "exact"), (8, "float32"), (8, "exact")])
def test_no_pool_is_copied(num_pending, num_nodes, precision):
    program = compiled("kda", num_pending, num_nodes, precision)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= LAYERS * NUM_SLOTS * STATE_BYTES
    assert memory.temp_size_in_bytes < NUM_SLOTS * STATE_BYTES / 4
    assert not re.findall(rf"= f32\[{NUM_SLOTS}[\d,]*\]\S* copy\(", program.as_text())


def test_matmuls_hold_no_state_of_a_node():
    """Sixteen nodes more add activations: about a seventh of what their states would take here."""
    small, large = (compiled("gdn", 4, n, "float32").memory_analysis().temp_size_in_bytes for n in (4, 20))
    assert large - small < 16 * ROWS * STATE_BYTES / 4
