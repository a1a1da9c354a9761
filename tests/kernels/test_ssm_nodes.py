"""`ssm_nodes` is the recurrence along pending chains and draft trees, and touches only what the plan names.

A float32 product or sum errs by 6e-8. An output is a sum of some tens of them, which add like a random
walk, and the delta rules solve a system that amplifies them a few times: 2e-6 of the largest value holds
them all, and one product in bfloat16 or TF32 (4e-3, 5e-4) breaks it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch
from kernels_pallas.ssm_nodes import check_plan, ssm_nodes

from .nodes_round import KINDS, TREES, Row, assert_close, make_round

TOLERANCE = 2e-6
WAYS = [("xla", "float32"), ("xla", "exact"), ("reference", "exact")]
# A fresh request, two that move on in place and to another slot, a pure verify, a decode, a copy, a clear,
# and padding.
ROWS = (
    Row(write=1, pending=5, nodes=6),
    Row(read=2, write=2, pending=4, track=(3, 2), nodes=1),
    Row(read=4, write=5, pending=5, track=(6, 5)),
    Row(read=7, nodes=7),
    Row(),
    Row(read=8, write=8, pending=1, track=(9, 1)),
    Row(read=10, write=11),
    Row(write=12),
    Row(read=13, write=14, nodes=4),
)


@pytest.mark.parametrize(("implementation", "precision"), WAYS)
@pytest.mark.parametrize("heads", [(1, 3), (5, 5)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_sort_follow_the_recurrence(kind, heads, implementation, precision):
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, heads=heads, state_dim=12, head_dim=5)
    for got, want in zip(r.call(implementation, precision=precision), r.expected(), strict=True):
        if got.shape == r.pool.shape:
            written = np.unique([r.plan.write_slot, r.plan.track_slot])[1:]
            got, want = got[written], want[written]
        assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_every_shape_and_size_follow_the_recurrence(kind, tree):
    for num_nodes in (1, 7, 64):
        rows = (Row(read=1, nodes=num_nodes), Row(read=2, nodes=1 + num_nodes // 2))
        r = make_round(kind, rows, num_pending=0, num_nodes=num_nodes, tree=tree, seed=num_nodes)
        want = r.expected()[2]
        for precision in ("float32", "exact"):
            assert_close(r.call("xla", precision=precision)[2], want, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_before_slow_decays_keeps_their_digits(kind):
    """Decays of 0, of -inf, and of 1e3 beside 1e-4: a difference of two sums would lose the slow ones."""
    r = make_round(kind, [Row(read=1, nodes=32)], num_pending=0, num_nodes=32)
    decay = r.nodes.log_decay
    decay[:, ::3] *= 50.0
    decay[:, 1::7] = 0.0
    decay[:, 2::11] = -np.inf
    assert_close(r.call()[2], r.expected()[2], TOLERANCE)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_one_key_written_again_and_again_stays_exact(kind):
    """The system of a chain is then all ones below the diagonal, and its powers are huge."""
    r = make_round(
        kind, [Row(read=1, nodes=64)], num_pending=0, num_nodes=64, tree="chain", decay=(1e-6, 1e-5)
    )
    r.nodes.k[:] = r.nodes.k[:, :1]
    r.nodes.beta[:] = 1.0
    assert_close(r.call()[2], r.expected()[2], TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_on_the_depth_changes_rounding_at_most(kind):
    r = make_round(kind, [Row(read=1, nodes=33)], num_pending=0, num_nodes=33, tree="eagle")
    # A root and eight levels of four.
    check_plan(r.plan, num_slots=3, num_pending=0, depth=9)
    # On a CPU "fast" is float32 too.
    for precision in ("float32", "fast"):
        assert_close(r.call(depth=9, precision=precision)[2], r.expected()[2], TOLERANCE)


@pytest.mark.parametrize("tree", ["chain", "forest"])
def test_kda_with_bounded_gates_factors_its_decays(tree):
    r = make_round("kda", [Row(read=1, nodes=16)], num_pending=0, num_nodes=16, tree=tree, decay=(1e-4, 5.0))
    assert_close(r.call(min_log_decay=-5.0)[2], r.expected()[2], TOLERANCE)
    text = {
        bound: jax.jit(lambda *x, bound=bound: ssm_nodes("kda", *x, min_log_decay=bound))
        .lower(*r.arguments()[1:])
        .as_text()
        for bound in (-5.0, -5.1, None)
    }
    # Only the pairwise form goes through the nodes one by one.
    assert [text[bound].count("stablehlo.while") for bound in (-5.0, -5.1, None)] == [0, 1, 1]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_pool_rounds_after_every_token(kind, implementation):
    """Rounded from float64 and from float32, a state may differ by one bfloat16 step, 2^-8."""
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, dtype="bfloat16")
    pool, pending_out, node_out = r.call(implementation, precision="exact")
    want_pool, want_pending, want_nodes = r.expected()
    written = np.unique([r.plan.write_slot, r.plan.track_slot])[1:]
    assert_close(pool[written].astype(np.float64), want_pool[written], 2**-8)
    assert_close(pending_out, want_pending, 2**-8)
    assert_close(node_out, want_nodes, 2**-8)
    # Most are equal bit for bit, which they would not be if tokens were not rounded one by one.
    assert (pool[written].astype(np.float64) == want_pool[written]).mean() > 0.99


def test_inputs_of_any_float_dtype_give_float32():
    r = make_round("gdn", ROWS, num_pending=5, num_nodes=7)
    kind, pool, *inputs, plan = r.arguments()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), inputs)
    for implementation, precision in WAYS:
        call = functools.partial(ssm_nodes, kind, precision=precision, implementation=implementation)
        assert {x.dtype for x in jax.eval_shape(call, pool, *half, plan)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_without_queries_a_chain_has_no_outputs(implementation):
    r = make_round("gdn", ROWS, num_pending=5, num_nodes=7)
    pool, none, _ = dataclasses.replace(r, pending=r.pending._replace(q=None)).call(implementation)
    assert none is None
    assert pool[1:].tobytes() == r.call(implementation)[0][1:].tobytes()


def test_no_rows_are_no_work():
    r = make_round("gdn", ROWS, num_pending=5, num_nodes=7)
    kind, pool, *rest = r.arguments()
    got, pending_out, node_out = ssm_nodes(kind, pool, *jax.tree.map(lambda x: x[:0], rest))
    assert got is pool
    assert (pending_out.shape, node_out.shape) == ((0, 5, 4, 8), (0, 7, 4, 8))
    pending, nodes, plan = jax.tree.map(lambda x: x[:0], rest)
    assert ssm_nodes(kind, pool, pending._replace(q=None), nodes, plan)[1] is None


def test_wrong_arguments_are_refused_by_name():
    r = make_round("gdn", [Row(read=1, write=1, pending=2, nodes=3)], num_pending=2, num_nodes=3)
    kind, pool, pending, nodes, plan = r.arguments()
    wide = make_round("gdn", [Row(read=1, nodes=3)], num_pending=0, num_nodes=3, state_dim=16).arguments()[3]
    good = {"kind": kind, "pool": pool, "pending": pending, "nodes": nodes, "plan": plan}
    for message, wrong in (
        ("unknown kind 'rwkv'", {"kind": "rwkv"}),
        ("unknown precision 'half'; there are exact, float32, fast", {"precision": "half"}),
        ("must be float32 or bfloat16, got float16", {"pool": pool.astype(jnp.float16)}),
        (
            "unknown implementation 'cuda'; there are xla, triton, tpu, reference",
            {"implementation": "cuda"},
        ),
        ("depth counts nodes of a path and is at least 1, got 0", {"depth": 0}),
        ("min_log_decay bounds numbers that are at most 0, got 5.0", {"min_log_decay": 5.0}),
        ("plan.parent has 3 nodes a row, the node inputs 0", {"nodes": None}),
        (r"plan.node_len must have 1 rows", {"plan": plan._replace(node_len=jnp.zeros(2, jnp.int32))}),
        (r"v must have shape \(1, 2, 4, 8\)", {"pending": pending._replace(v=jnp.zeros((1, 2, 4, 9)))}),
        (r"nodes: k must have shape \(1, 3, 2, 8\)", {"nodes": wide}),
        ("nodes: q is None", {"nodes": nodes._replace(q=None)}),
        (r"pending: q must have k's shape", {"pending": pending._replace(q=pending.q[:, :1])}),
        ("nodes: 'gdn' needs beta", {"nodes": nodes._replace(beta=None)}),
        ("pending: 'mamba2' takes no beta", {"kind": "mamba2"}),
        ("pending: 'kda' takes log_decay", {"kind": "kda"}),
    ):
        with pytest.raises(ValueError, match=message):
            ssm_nodes(**{**good, **wrong})


def test_explain_says_what_a_call_takes():
    r = make_round("gdn", [Row(read=1, nodes=3)], num_pending=0, num_nodes=3)
    for platform in ("cpu", "gpu", "tpu"):
        found = dispatch.explain("ssm_nodes", *r.arguments(), platform=platform)
        assert found.taken is not None
        assert str(found).startswith(f"ssm_nodes on {platform}: {found.taken}")
    with pytest.raises(ValueError, match="no op 'ssm_leaves'"):
        dispatch.explain("ssm_leaves")
