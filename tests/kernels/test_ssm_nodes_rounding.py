"""With products rounded as matrix units round them, the "fast" form errs by a few of their roundings.

A CPU computes "fast" in float32, so the products are rounded by hand here. An operand in bfloat16 errs by
2^-9, in TF32 by 2^-12; an output goes through a few such products in turn, and the delta rules' system
amplifies them. Decays come out right, however they are summed: exponentials of sums of up to 1e3 with an
error of 2^-9 would be wrong by any factor.
"""

import jax
import numpy as np
import pytest

from kernels_pallas.ssm_nodes import tiles, xla

from .nodes_round import KINDS, Row, assert_close, make_round


def outputs(r, mantissa_bits):
    """Of the nodes of a round without pending tokens, with products of operands of so many bits."""
    kind, pool, _, nodes, plan = r.arguments()
    _, sum_dot = tiles.products("fast")
    masked = jax.jit(xla.masked_outputs, static_argnames=("kind", "depth", "min_log_decay", "dot", "sum_dot"))
    return np.asarray(
        masked(
            kind,
            pool[plan.read_slot],
            nodes,
            plan,
            depth=nodes.v.shape[1],
            min_log_decay=None,
            dot=tiles.rounded_dot(mantissa_bits),
            sum_dot=sum_dot,
        )
    )


@pytest.mark.parametrize(("mantissa_bits", "tolerance"), [(7, 2e-2), (10, 2e-3)], ids=["bfloat16", "tf32"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_err_by_a_few_roundings(kind, mantissa_bits, tolerance):
    r = make_round(
        kind, [Row(read=1, nodes=16)], num_pending=0, num_nodes=16, state_dim=64, head_dim=32, tree="forest"
    )
    want = r.expected()[2]
    got = outputs(r, mantissa_bits)
    assert_close(got, want, tolerance)
    # The rounding is really there.
    assert np.abs(got - want).max() > 2.0 ** -(mantissa_bits + 6) * np.abs(want).max()


@pytest.mark.parametrize("kind", KINDS)
def test_full_operands_are_the_float32_form(kind):
    r = make_round(kind, [Row(read=1, nodes=7)], num_pending=0, num_nodes=7)
    assert_close(outputs(r, 23), r.call()[2].astype(np.float64), 1e-6)
