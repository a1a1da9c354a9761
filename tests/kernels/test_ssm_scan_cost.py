"""A decay for each channel costs at most three times a decay for each head, in time and in memory.

The direct form of KDA needs a `[token, token, state_dim]` array a head and is 13 times slower than gated
DeltaNet. Times are CPU time of this process, the least of some runs, the two taken in turn, so that a busy
machine changes both alike; the bound on them has slack for what is left (measured: 1.5 to 2.1).
"""

import time

import jax
import pytest

from kernels_pallas.blocks import cut_rows
from kernels_pallas.ssm_scan import ssm_scan


@pytest.fixture(scope="module")
def compiled(problem):
    """For each kind the compiled scan of 16 blocks of 64 tokens, and its arguments."""
    result = {}
    for kind in ("gdn", "kda"):
        p = problem(kind, [256] * 4, block_tokens=64, heads=(4, 4), state_dim=32, head_dim=32)
        blocks = cut_rows(p.lengths, 64, exports=[[5, 256]] * 4)
        args = jax.device_put((*p.packed(blocks), p.initial, blocks))
        scan = jax.jit(lambda *x, kind=kind: ssm_scan(kind, *x)).lower(*args).compile()
        result[kind] = scan, args
    return result


def test_kda_takes_at_most_four_times_as_long_as_gated_deltanet(compiled):
    least = dict.fromkeys(compiled, float("inf"))
    for _ in range(8):
        for kind, (scan, args) in compiled.items():
            start = time.process_time()
            jax.block_until_ready(scan(*args))
            least[kind] = min(least[kind], time.process_time() - start)
    assert least["kda"] <= 4 * least["gdn"], least


def test_kda_takes_at_most_three_times_the_memory_of_gated_deltanet(compiled):
    temporary = {kind: scan.memory_analysis().temp_size_in_bytes for kind, (scan, _) in compiled.items()}
    assert temporary["kda"] <= 3 * temporary["gdn"], temporary
    # No array of [token, token, state_dim] a head: 16 * 4 * 64 * 64 * 32 floats.
    assert temporary["kda"] < 16 * 4 * 64 * 64 * 32 * 4
