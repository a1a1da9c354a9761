"""The TPU kernel of `ssm_nodes`, interpreted, is the recurrence, and its transfers do not race.

Interpreted means: XLA for the CPU computes its products, which are as precise at "fast" as at "float32";
`test_ssm_nodes_rounding` emulates the rounding of matrix units. What a TPU makes of the kernel is not shown.
"""

import pytest

from .nodes_round import KINDS, assert_close, make_round
from .test_ssm_nodes import ROWS, TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_has_the_bits_of_the_definition(kind, dtype):
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, tree="forest", state_dim=16, dtype=dtype)
    (pool, *outs), (want, *want_outs) = (r.call(x, precision="exact") for x in ("tpu", "reference"))
    assert pool[1:].tobytes() == want[1:].tobytes()
    for out, want_out in zip(outs, want_outs, strict=True):
        assert out.tobytes() == want_out.tobytes()


# Heads that share keys, heads that do not, an odd number, and two tiles of heads with one key head.
@pytest.mark.parametrize(
    ("kind", "heads"),
    [("mamba2", (1, 16)), ("mamba2", (1, 3)), ("gdn", (2, 4)), ("gdn", (8, 16)), ("kda", (5, 5))],
    ids=str,
)
def test_masked_nodes_follow_the_recurrence_and_chains_keep_their_bits(kind, heads):
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, heads=heads, state_dim=16)
    pool, pending_out, node_out = r.call("tpu", precision="float32")
    want, want_out, _ = r.call("reference")
    assert pool[1:].tobytes() == want[1:].tobytes()
    assert pending_out.tobytes() == want_out.tobytes()
    assert_close(node_out, r.expected()[2], TOLERANCE)


def test_slot_0_is_not_written():
    """What nobody reads is not moved: the null slot keeps its bits, as all slots do that no row names."""
    r = make_round("gdn", ROWS, num_pending=5, num_nodes=7, state_dim=16)
    pool, _, _ = r.call("tpu", precision="float32")
    assert pool[0].tobytes() == r.pool[0].tobytes()
