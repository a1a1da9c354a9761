"""The Triton form of `ssm_nodes` is the recurrence, and in the exact form has the bits of every other way.

Pallas interprets the kernel here, in float32 throughout: what TF32 products do to outputs is in
`test_ssm_nodes_rounding`, and what the compiler makes of the kernel in `tests/aot`. Tolerances as in
`test_ssm_nodes`.
"""

import dataclasses

import numpy as np
import pytest

from kernels_pallas import dispatch
from kernels_pallas.ssm_nodes import ssm_nodes

from .nodes_round import KINDS, Row, assert_close, make_round

TOLERANCE = 2e-6
# A fresh request, two that move on in place and to another slot, a pure verify, padding, a decode, a copy
# and a clear.
ROWS = (
    Row(write=1, pending=5, nodes=6),
    Row(read=2, write=2, pending=4, track=(3, 2), nodes=1),
    Row(read=4, write=5, pending=5, track=(6, 5)),
    Row(read=7, nodes=7),
    Row(),
    Row(read=8, write=8, pending=1, track=(9, 1)),
    Row(read=10, write=11),
    Row(write=12),
)


def written(r):
    return np.unique([r.plan.write_slot, r.plan.track_slot])[1:]


@pytest.mark.parametrize(("kind", "heads"), [("mamba2", (1, 3)), ("gdn", (2, 4)), ("kda", (3, 3))])
def test_rows_of_every_sort_follow_the_recurrence(kind, heads):
    """Two tiles of 32 columns, and nodes padded from 7 to 16."""
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, heads=heads, state_dim=16, head_dim=64)
    for got, want in zip(r.call("triton"), r.expected(), strict=True):
        if got.shape == r.pool.shape:
            got, want = got[written(r)], want[written(r)]
        assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("gdn", "bfloat16")])
def test_the_exact_form_has_the_bits_of_the_default(kind, dtype):
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, state_dim=8, head_dim=16, dtype=dtype)
    one, other = (r.call(name, precision="exact") for name in ("triton", "xla"))
    assert one[0][1:].tobytes() == other[0][1:].tobytes()
    assert one[1].tobytes() == other[1].tobytes()
    assert one[2].tobytes() == other[2].tobytes()


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_tokens_fold_with_the_same_bits_one_by_one_and_beside_nodes(kind):
    lengths = np.array([5, 4, 5, 0, 0, 1, 0, 0])
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, state_dim=16, head_dim=16)
    whole, whole_out, _ = r.call("triton", precision="fast")
    # A row without tokens or slot to write has nothing to go on from.
    read, write = (np.where(lengths > 0, x, 0) for x in (r.plan.read_slot, r.plan.write_slot))
    pool, outs = r.pool, []
    for n in range(5):
        start, stop = np.minimum(lengths, n), np.minimum(lengths, n + 1)
        pool, out, _ = r.part(pool, start, stop, write if n else read, write).call("triton")
        outs.append(out[:, 0])
    assert np.stack(outs, axis=1).tobytes() == whole_out.tobytes()
    moved = write[write > 0]
    assert pool[moved].tobytes() == whole[moved].tobytes()


@pytest.mark.parametrize(("num_nodes", "tree"), [(16, "forest"), (33, "eagle")])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_every_size_follow_the_recurrence(kind, num_nodes, tree):
    rows = (Row(read=1, nodes=num_nodes), Row(read=2, nodes=1 + num_nodes // 2))
    shape = {"num_pending": 0, "num_nodes": num_nodes, "tree": tree, "state_dim": 16, "head_dim": 16}
    r = make_round(kind, rows, **shape, decay=(1e-4, 5.0))
    bound = {"depth": 9, "min_log_decay": -5.0} if num_nodes == 33 else {}
    assert_close(r.call("triton", **bound)[2], r.expected()[2], TOLERANCE)


def test_without_queries_a_chain_has_no_outputs():
    r = make_round("gdn", [dataclasses.replace(row, nodes=0) for row in ROWS], num_pending=5, num_nodes=0)
    pool, none, _ = dataclasses.replace(r, pending=r.pending._replace(q=None)).call("triton")
    assert none is None
    assert pool[1:].tobytes() == r.call("triton")[0][1:].tobytes()


def test_what_the_kernel_cannot_do_goes_to_another_implementation():
    def call(kind="gdn", num_nodes=17, state_dim=16, **options):
        r = make_round(
            kind, [Row(read=1, nodes=num_nodes)], num_pending=0, num_nodes=num_nodes, state_dim=state_dim
        )
        with pytest.raises(NotImplementedError) as refused:
            ssm_nodes(*r.arguments(), implementation="triton", **options)
        found = dispatch.explain("ssm_nodes", *r.arguments(), platform="gpu", **options)
        assert found.taken == "xla"
        assert found.refused == {"triton": str(refused.value)}
        return str(refused.value)

    assert "powers of two, got (12, 8)" in call(state_dim=12)
    assert "16 or more, got (16, 8)" in call()
    assert "'exact' takes up to 16 nodes, got 17" in call(precision="exact")
    r = make_round("kda", [Row(read=1, nodes=17)], num_pending=0, num_nodes=17, state_dim=16, head_dim=16)
    for bound, taken in ((-4.0, "triton"), (-5.0, "xla"), (None, "xla")):
        found = dispatch.explain("ssm_nodes", *r.arguments(), platform="gpu", min_log_decay=bound)
        assert found.taken == taken
    assert "'kda' takes up to 16 nodes, got 17" in found.refused["triton"]
