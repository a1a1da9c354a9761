"""Draft trees: positions go by depth, selections stay connected, and track points go by path position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mambacache_jax.host.draft_tree import (
    ancestors,
    chain,
    check_tree,
    crossing,
    node_depth,
    path_to,
    positions,
    prefix_tree,
    rooted,
    select_best,
    static_tree,
)

BOUNDED = settings(max_examples=60, derandomize=True, deadline=None)


@st.composite
def trees(draw, max_nodes=24):
    size = draw(st.integers(1, max_nodes))
    return np.array([draw(st.integers(-1, node - 1)) for node in range(size)], np.int32)


@BOUNDED
@given(trees())
def test_depth_path_and_ancestors_tell_the_same_story(parent):
    check_tree(parent)
    depth, mask = node_depth(parent), ancestors(parent)
    for node in range(len(parent)):
        path = path_to(parent, node)
        assert path[-1] == node
        assert parent[path[0]] == -1
        assert (parent[path[1:]] == path[:-1]).all()
        assert len(path) == depth[node] + 1
        assert set(np.flatnonzero(mask[node])) == set(path.tolist())
    assert (positions(parent, 17) == 17 + depth).all()


def test_positions_count_depth_and_not_nodes():
    assert positions(static_tree((2, 2)), 10).tolist() == [10, 11, 11, 12, 12, 12, 12]


@pytest.mark.parametrize(
    ("parent", "options", "why"),
    [
        ([], {}, "no nodes"),
        ([0], {}, "Node 0 has parent 0"),
        ([-1, 2, 0], {}, "Node 1 has parent 2"),
        ([-1, -2], {}, "Node 1 has parent -2"),
        ([-1, -1], {"rooted": True}, "only node 0"),
        ([-1, 0, 1], {"depth": 2}, "3 nodes, and 2 are the most"),
        ([[-1]], {}, "integer vector"),
        ([0.5], {}, "integer vector"),
    ],
)
def test_what_is_no_tree_is_refused(parent, options, why):
    with pytest.raises(ValueError, match=why):
        check_tree(np.array(parent, np.int32 if not parent or parent[0] != 0.5 else np.float32), **options)


def test_static_trees_are_rooted_and_go_level_by_level():
    assert chain(4).tolist() == [-1, 0, 1, 2]
    assert static_tree((1, 1, 1)).tolist() == chain(4).tolist()
    assert static_tree((3, 1)).tolist() == [-1, 0, 0, 0, 1, 2, 3]
    check_tree(static_tree((4, 2, 1)), rooted=True, depth=4)


@BOUNDED
@given(trees(), st.integers(1, 24), st.randoms(use_true_random=False))
def test_a_selection_is_the_best_and_keeps_parents(parent, num_nodes, random):
    # Few distinct values, zero among them, so that ties along paths are common.
    log_prob = np.array([random.choice([0.0, 0.0, -0.5, -1.0, -np.inf]) for _ in parent])
    kept, of_kept = select_best(parent, log_prob, num_nodes)
    assert len(kept) == min(num_nodes, len(parent))
    check_tree(of_kept)
    for place, node in enumerate(kept):
        before = parent[node]
        assert of_kept[place] == (-1 if before < 0 else kept.tolist().index(before))
    total = np.array([log_prob[path_to(parent, node)].sum() for node in range(len(parent))])
    left_out = np.setdiff1d(np.arange(len(parent)), kept)
    assert not len(left_out) or total[kept].min() >= total[left_out].max()


def test_a_selection_refuses_what_is_no_log_probability():
    with pytest.raises(ValueError, match="at most 0"):
        select_best(np.array([-1]), np.array([0.1]), 1)
    with pytest.raises(ValueError, match="at most 0"):
        select_best(np.array([-1]), np.array([np.nan]), 1)


def test_runs_share_their_beginning_and_no_siblings_are_equal():
    tokens, parent = prefix_tree([[5, 6, 7], [5, 6, 8], [5, 6, 7, 9], [1]], 5)
    assert tokens.tolist() == [5, 6, 7, 8, 9]
    assert parent.tolist() == [-1, 0, 1, 1, 2]
    nodes, of_nodes = rooted(tokens, parent, bonus=3)
    assert nodes.tolist() == [3, 5, 6, 7, 8, 9]
    assert of_nodes.tolist() == [-1, 0, 1, 2, 2, 3]
    check_tree(of_nodes, rooted=True, depth=5)
    assert prefix_tree([], 4)[0].tolist() == []


@BOUNDED
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
def test_a_crossing_is_the_last_track_point_in_the_run(kv_len, accepted, interval):
    reached = [m for m in range(1, accepted + 1) if (kv_len + m) % interval == 0]
    assert crossing(kv_len, accepted, interval) == (reached[-1] if reached else 0)


def test_a_crossing_counts_along_the_path_where_node_indices_differ():
    parent = static_tree((2, 2))
    path = path_to(parent, 6)
    place = crossing(14, len(path), 16)
    assert place == 2
    assert path[place - 1] == 2
    assert positions(parent, 14)[path[place - 1]] + 1 == 16
