"""The exact form gives a token the same bits however it is computed: alone, in a chain, tree or batch.

All comparisons are of bits. Programs with other shapes are other programs to XLA, so this holds by how the
arithmetic is written, not by how it happens to be compiled.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.ssm_nodes.reference import commit_snapshots, ssm_nodes_snapshots

from .nodes_round import KINDS, Round, Row, make_round

LENGTHS = (7, 3, 1, 6)
ROWS = (
    Row(read=1, write=1, pending=7, track=(5, 4), nodes=5),
    Row(read=2, write=6, pending=3, track=(7, 3), nodes=8),
    Row(write=3, pending=1, nodes=1),
    Row(read=4, write=4, pending=6, nodes=8),
)
IMPLEMENTATIONS = ("xla", "reference")


def assert_same_bits(got, want):
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_fold_at_once_in_parts_and_one_by_one(kind, dtype):
    r = make_round(kind, ROWS, num_pending=7, num_nodes=8, heads=(1, 3), state_dim=12, dtype=dtype)
    whole, whole_out, _ = r.call("xla", precision="exact")
    write, read = r.plan.write_slot, r.plan.read_slot
    for implementation in IMPLEMENTATIONS:
        for cuts in ([[2, 3, 0, 5]], [[n] * 4 for n in range(1, 7)]):
            pool, at, outs = r.pool, np.zeros(4, int), [[] for _ in ROWS]
            for cut in [*cuts, LENGTHS]:
                cut = np.clip(cut, at, LENGTHS)
                here = read if at.max() == 0 else write
                pool, out, _ = r.part(pool, at, cut, here, write).call(implementation)
                for row, (a, b) in enumerate(zip(at, cut, strict=True)):
                    outs[row].append(out[row, : b - a])
                at = cut
            for row, length in enumerate(LENGTHS):
                assert_same_bits(np.concatenate(outs[row]), whole_out[row, :length])
            assert_same_bits(pool[write], whole[write])


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_has_the_bits_of_the_default(kind, dtype):
    r = make_round(kind, ROWS, num_pending=7, num_nodes=8, dtype=dtype)
    one, other = (r.call(name, precision="exact") for name in IMPLEMENTATIONS)
    assert_same_bits(one[0][1:], other[0][1:])
    assert_same_bits(one[1], other[1])
    assert_same_bits(one[2], other[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracked_state_is_that_of_a_chain_that_ends_there(kind, dtype):
    r = make_round(kind, ROWS, num_pending=7, num_nodes=8, dtype=dtype)
    pool, _, _ = r.call()
    for length in (3, 4):
        stop = np.minimum(LENGTHS, length)
        short, _, _ = r.part(r.pool, [0] * 4, stop, r.plan.read_slot, r.plan.write_slot).call()
        row = 0 if length == 4 else 1
        assert_same_bits(pool[r.plan.track_slot[row]], short[r.plan.write_slot[row]])


@pytest.mark.parametrize("tree", ["bushy", "forest"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_has_the_bits_of_decoding_its_path(kind, tree, dtype):
    r = make_round(kind, ROWS, num_pending=7, num_nodes=8, tree=tree, dtype=dtype)
    pool, _, node_out = r.call(precision="exact")
    for row, node_len in enumerate(r.plan.node_len):
        for node in range(node_len):
            path = [node]
            while r.plan.parent[row, path[0]] >= 0:
                path.insert(0, r.plan.parent[row, path[0]])
            decoded, slot = pool, r.plan.write_slot[row]
            for at in path:
                decoded, out, _ = _one_token(r, row, at, decoded, slot).call()
            assert_same_bits(out[0, 0], node_out[row, node])


def _one_token(r, row, node, pool, slot):
    """The decoding of one node of `r` as a token of its own, in place."""
    pending = type(r.nodes)(*(None if x is None else x[row : row + 1, node : node + 1] for x in r.nodes))
    plan = make_round(r.kind, [Row(read=1, write=1, pending=1)], num_pending=1, num_nodes=0).plan
    slots = np.array([slot], np.int32)
    return Round(r.kind, pool, pending, None, plan._replace(read_slot=slots, write_slot=slots))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_runs_beside(kind):
    r = make_round(kind, ROWS, num_pending=7, num_nodes=8)
    whole = r.call(precision="exact")
    for rows in ([1], [2, 1, 0]):
        pending, nodes, plan = (
            type(part)(*(None if x is None else x[rows] for x in part))
            for part in (r.pending, r.nodes, r.plan)
        )
        some = Round(kind, r.pool, pending, nodes, plan).call(precision="exact")
        at = rows.index(1)
        assert_same_bits(some[0][[6, 7]], whole[0][[6, 7]])
        assert_same_bits(some[1][at], whole[1][1])
        assert_same_bits(some[2][at], whole[2][1])


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_of_all_nodes_are_another_way_to_the_same_bits(kind, dtype):
    rows = (Row(read=1, nodes=6), Row(nodes=3))
    r = make_round(kind, rows, num_pending=0, num_nodes=6, dtype=dtype)
    _, pool, _, nodes, plan = r.arguments()
    out, snapshots = ssm_nodes_snapshots(kind, pool, nodes, plan)
    assert_same_bits(out, r.call(precision="exact")[2])
    committed = commit_snapshots(pool, snapshots, jnp.array([5, 2]), jnp.array([1, 2]))
    for row, node in ((0, 5), (1, 2)):
        path = [node]
        while r.plan.parent[row, path[0]] >= 0:
            path.insert(0, r.plan.parent[row, path[0]])
        replayed = r.pool
        for n, at in enumerate(path):
            token = _one_token(r, row, at, replayed, row + 1)
            if n == 0:
                token = Round(
                    kind,
                    replayed,
                    token.pending,
                    None,
                    token.plan._replace(read_slot=plan.read_slot[row : row + 1]),
                )
            replayed, _, _ = token.call()
        assert_same_bits(committed[row + 1], replayed[row + 1])
