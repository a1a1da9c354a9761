"""Acceptance keeps exactly the drafts that plain decoding would have chosen, and ends where it would end."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mambacache_jax.engine.sampler import sample
from mambacache_jax.host.draft_tree import node_depth, static_tree
from mambacache_jax.host.plan import pack_sampling
from mambacache_jax.spec import DraftTree, choose, cut, walk, walk_typical
from mambacache_jax.spec.tree import node_depth as node_depth_on_device
from mambacache_jax.spec.tree import paths

NODES, DEPTH, VOCAB = 9, 5, 4
walked = jax.jit(walk, static_argnames="depth")
ended = jax.jit(cut)
chosen_behind = jax.jit(choose, static_argnames=("sample", "depth"))
drawn = jax.jit(sample)


def as_tree(rows):
    """Trees `(tokens, parent)` padded with nonsense."""
    tokens, parent = np.full((2, len(rows), NODES), 10**6, np.int32)
    for r, (of_row, parent_of_row) in enumerate(rows):
        tokens[r, : len(of_row)], parent[r, : len(of_row)] = of_row, parent_of_row
    return DraftTree(tokens, parent, np.array([len(t) for t, _ in rows], np.int32))


@st.composite
def tree_and_choice(draw):
    size = draw(st.integers(0, NODES))
    parent, depth = [-1][:size], [0]
    for node in range(1, size):
        parent.append(draw(st.sampled_from([n for n in range(node) if depth[n] < DEPTH - 1])))
        depth.append(depth[parent[-1]] + 1)
    draw_token = st.integers(0, VOCAB - 1)
    return [draw(draw_token) for _ in range(size)], parent, [draw(draw_token) for _ in range(NODES)]


def expected(tokens, parent, chosen):
    """The run by the definition: follow the first child that holds the chosen token."""
    if not tokens:
        return [], []
    path = [0]
    while True:
        hit = [n for n in range(len(tokens)) if parent[n] == path[-1] and tokens[n] == chosen[path[-1]]]
        if not hit:
            return path, [chosen[node] for node in path]
        path.append(hit[0])


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(tree_and_choice(), min_size=3, max_size=3))
def test_a_run_is_the_one_that_plain_decoding_would_take(rows):
    chosen = np.array([choice for _, _, choice in rows], np.int32)
    got = walked(as_tree([row[:2] for row in rows]), chosen, depth=DEPTH)
    ends = np.asarray(got.next_token()), np.asarray(got.last_node())
    got = jax.device_get(got)
    for r, row in enumerate(rows):
        path, tokens = expected(*row)
        length = int(got.length[r])
        assert got.path[r, :length].tolist() == path
        assert got.tokens[r, :length].tolist() == tokens
        assert not got.path[r, length:].any()
        assert not got.tokens[r, length:].any()
        if path:
            assert (ends[0][r], ends[1][r]) == (tokens[-1], path[-1])


def test_depths_and_paths_on_the_device_are_those_of_the_host():
    parent = static_tree((2, 2, 1))
    tree = DraftTree(np.zeros((1, 11), np.int32), parent[None], np.array([11], np.int32))
    assert jax.jit(node_depth_on_device, static_argnums=1)(tree, 4)[0].tolist() == node_depth(parent).tolist()
    table = np.asarray(jax.jit(paths, static_argnums=1)(tree, 4))
    assert table[0, 9].tolist() == [0, 2, 5, 9]
    assert table[0, 2].tolist() == [0, 2, -1, -1]


def test_the_first_of_equal_siblings_is_taken():
    chosen = np.array([[2, 3, 0, 1, 0, 0, 0, 0, 0]], np.int32)
    got = walked(as_tree([([1, 2, 2, 3], [-1, 0, 0, 1])]), chosen, depth=DEPTH)
    assert got.path[0].tolist() == [0, 1, 3, 0, 0]


CHAIN = ([9, 5, 6, 7], [-1, 0, 1, 2])
AGREE = np.array([[5, 6, 7, 8, 0, 0, 0, 0, 0]], np.int32)


@pytest.mark.parametrize(
    ("stops", "limit", "tokens", "stopped"),
    [
        ((-1, -1), 9, [5, 6, 7, 8], False),
        ((6, -1), 9, [5, 6], True),
        ((7, 5), 9, [5], True),
        ((8, -1), 9, [5, 6, 7, 8], True),
        ((-1, -1), 1, [5], True),
        ((-1, -1), 3, [5, 6, 7], True),
        ((7, -1), 2, [5, 6], True),
        ((9, -1), 9, [5, 6, 7, 8], False),
    ],
)
def test_a_stop_token_or_a_limit_ends_the_run_there(stops, limit, tokens, stopped):
    got = ended(walked(as_tree([CHAIN]), AGREE, depth=DEPTH), np.array([stops]), np.array([limit]))
    assert got.tokens[0].tolist() == tokens + [0] * (DEPTH - len(tokens))
    # The last token is kept and not folded: the run has as many nodes as there are tokens behind them.
    assert int(got.length[0]) == len(tokens)
    assert got.path[0].tolist() == [*range(len(tokens)), *[0] * (DEPTH - len(tokens))]
    assert bool(got.stopped[0]) == stopped


def test_a_padding_row_accepts_nothing_and_does_not_stop():
    got = walked(as_tree([([], [])]), np.zeros((1, NODES), np.int32), depth=DEPTH)
    got = ended(got, np.array([[0, 0]]), np.array([0]))
    assert (int(got.length[0]), bool(got.stopped[0]), int(got.next_token()[0])) == (0, False, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_choice_behind_a_node_is_that_of_plain_sampling_at_its_position(temperature):
    tree = as_tree([([3, 1, 2, 0, 1], [-1, 0, 0, 1, 2]), ([1, 1], [-1, 0])])
    logits = np.random.default_rng(0).standard_normal((2, NODES, 50)).astype(np.float32)
    fields = np.stack([pack_sampling(temperature, 0.9, 0.0, 20, seed) for seed in (5, 6)])
    chosen = np.asarray(
        chosen_behind(sample, logits, fields, tree, np.array([100, 7], np.int32), depth=DEPTH)
    )
    for row, node, position in ((0, 0, 101), (0, 1, 102), (0, 2, 102), (0, 4, 103), (1, 0, 8), (1, 1, 9)):
        alone = drawn(logits[row, node][None], fields[row][None], np.array([position], np.int32))
        assert chosen[row, node] == alone[0]


def test_typical_acceptance_asks_for_consent_and_takes_likely_drafts():
    tree = as_tree([([0, 1, 2], [-1, 0, 0])])
    logits = np.log(np.tile(np.array([0.5, 0.15, 0.3, 0.05], np.float32), (1, NODES, 1)))
    chosen = np.zeros((1, NODES), np.int32)
    typical = jax.jit(walk_typical, static_argnames=("depth", "lossy"))
    with pytest.raises(ValueError, match="lossy=True"):
        typical(tree, chosen, logits, depth=DEPTH, lossy=False)
    got = typical(tree, chosen, logits, depth=DEPTH, lossy=True)
    assert got.path[0, : int(got.length[0])].tolist() == [0, 2]
    assert got.tokens[0, :2].tolist() == [2, 0]
    assert walked(tree, chosen, depth=DEPTH).length.tolist() == [1]
