"""The radix tree keeps its shape, locks and orders of eviction right, whatever is cut or removed."""

import numpy as np
import pytest

from mambacache_jax.host.key import TOKEN_BYTES, token_bytes
from mambacache_jax.host.lru import CheckpointOrder, LeafQueue
from mambacache_jax.host.node import Node, Root
from mambacache_jax.host.stats import Counts
from mambacache_jax.host.tree import RadixTree

ROOT = Root(None, Counts())


def grow(tree: RadixTree, tokens: list[int], checkpoint_slot: int = 0, namespace: str | None = None) -> Node:
    """Puts a path into the tree; the KV slot of each new token is 100 and its position."""
    key = token_bytes(tokens)
    path, cut, reached = tree.walk(key, len(key), tree.roots.get(namespace))
    if cut is not None:
        path.append(tree.split(cut, reached))
    node = path[-1] if path else tree.root(namespace, Counts())
    if reached < len(tokens):
        kv_slots = np.arange(100 + reached, 100 + len(tokens), dtype=np.int32)
        node = tree.add_leaf(node, key[reached * TOKEN_BYTES :], kv_slots.tobytes())
    if checkpoint_slot:
        tree.set_checkpoint(node, checkpoint_slot)
    tree.check_invariants()
    return node


def walked(tree: RadixTree, tokens: list[int], namespace: str | None = None) -> tuple[list[int], int, int]:
    """Positions of the nodes run through, position of the node that is left inside or 0, tokens shared."""
    key = token_bytes(tokens)
    path, cut, reached = tree.walk(key, len(key), tree.roots.get(namespace))
    return [node.position for node in path], cut.position if cut else 0, reached


def evict_leaf(tree: RadixTree) -> Node | None:
    popped = tree.pop_leaves(1)
    tree.check_invariants()
    return popped[0] if popped else None


def evict_order(tree: RadixTree) -> list[int]:
    order = []
    while (leaf := evict_leaf(tree)) is not None:
        order.append(leaf.position)
    return order


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(page_size=1)


def test_a_walk_tells_whole_nodes_from_the_one_it_leaves(tree):
    grow(tree, [1, 2, 3])
    grow(tree, [1, 2, 3, 4, 5])
    assert walked(tree, [1, 2, 3, 4, 5, 6]) == ([3, 5], 0, 5)
    assert walked(tree, [1, 2, 3, 4, 9]) == ([3], 5, 4)
    assert walked(tree, [1, 2]) == ([], 3, 2)
    assert walked(tree, [1, 2, 3]) == ([3], 0, 3)
    assert walked(tree, [9]) == ([], 0, 0)
    assert walked(tree, []) == ([], 0, 0)
    assert walked(tree, [1, 2, 3], "other") == ([], 0, 0)


def test_with_pages_a_walk_shares_whole_pages_only():
    tree = RadixTree(page_size=4)
    grow(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert walked(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]) == ([], 12, 8)
    assert walked(tree, [1, 2, 3, 0]) == ([], 0, 0)


def test_a_split_leaves_checkpoint_children_leases_and_recency_below(tree):
    node = grow(tree, [1, 2, 3, 4], checkpoint_slot=7)
    child = grow(tree, [1, 2, 3, 4, 5])
    tree.hold(child)
    tree.hold(node)
    tree.lock_checkpoint(node)
    stamp, protected = node.stamp, tree.protected_kv
    upper = tree.split(node, 3)
    tree.check_invariants()
    assert (upper.checkpoint_slot, upper.held, upper.ssm_lock, upper.stamp) == (0, 1, 0, stamp)
    assert (node.checkpoint_slot, node.held, node.ssm_lock, node.stamp) == (7, 2, 1, stamp)
    assert upper.kv_slots.tolist() == [100, 101, 102]
    assert node.kv_slots.tolist() == [103]
    assert (node.position, upper.position, child.parent) == (4, 3, node)
    assert tree.protected_kv == protected == 5
    tree.unlock_checkpoint(node)
    tree.release(node)
    tree.release(child)
    tree.check_invariants()
    assert tree.protected_kv == 0


def test_holding_a_node_keeps_every_ancestor_and_counts_each_slot_once(tree):
    nodes = [grow(tree, list(range(1, length + 1))) for length in (2, 5, 6)]
    tree.hold(nodes[2])
    tree.hold(nodes[1])
    tree.hold(nodes[2])
    assert [node.held for node in nodes] == [1, 2, 2]
    assert tree.protected_kv == 6
    assert evict_leaf(tree) is None
    tree.release(nodes[2])
    assert evict_leaf(tree) is None
    tree.release(nodes[2])
    tree.check_invariants()
    assert tree.protected_kv == 5
    assert evict_order(tree) == [6]
    tree.release(nodes[1])
    assert tree.protected_kv == 0
    assert evict_order(tree) == [5, 2]


def test_leaves_go_least_recently_used_first_and_a_parent_is_as_recent_as_its_children_were(tree):
    grow(tree, [1, 1])
    grow(tree, [1, 1, 2, 2, 2])
    old = grow(tree, [3])
    grow(tree, [4, 4, 4, 4])
    tree.touch(old)
    # [1, 1] was used before all others, but [1, 1, 2, 2, 2] after it, so it waits for its child alone.
    assert evict_order(tree) == [5, 2, 4, 1]


def test_a_parent_stays_as_recent_as_the_child_that_went_before_another(tree):
    parent = grow(tree, [1])
    held = [grow(tree, [1, 1, 1]), grow(tree, [2, 2])]
    for node in held:
        tree.hold(node)
    recent = grow(tree, [1, 5, 5, 5])
    assert evict_leaf(tree) is recent
    for node in held:
        tree.release(node)
    # Its other child was used before [2, 2], but the one that is gone after it.
    assert parent.stamp == recent.stamp
    assert evict_order(tree) == [3, 2, 1]


def test_the_order_of_leaves_equals_that_of_stamping_whole_paths(tree):
    rng = np.random.default_rng(0)
    uses: dict[Node, int] = {}
    nodes = [grow(tree, rng.integers(0, 3, rng.integers(1, 9)).tolist()) for _ in range(40)]
    nodes = list(tree.nodes())
    for clock, index in enumerate(rng.integers(0, len(nodes), 60).tolist()):
        tree.touch(nodes[index])
        node = nodes[index]
        while node is not None:
            uses[node] = clock
            node = node.parent
    for node in nodes:
        uses.setdefault(node, -1)
    seen = -1
    while (leaf := evict_leaf(tree)) is not None:
        assert uses[leaf] >= seen
        seen = uses[leaf]


def test_a_queue_entry_that_is_out_of_date_costs_one_push_and_no_wrong_victim():
    queue = LeafQueue()
    first, second = (Node(b"", b"", ROOT, position, position) for position in (1, 2))
    queue.push(first)
    queue.push(second)
    queue.push(first)
    assert sorted(node.position for node in queue.nodes()) == [1, 2]
    first.stamp = 5
    assert queue.pop() is second
    first.held = 1
    assert queue.pop() is None
    assert not first.queued
    first.held = 0
    queue.push(first)
    assert queue.pop() is first


def test_of_two_leaves_with_one_stamp_the_deeper_goes_first():
    queue = LeafQueue()
    upper, lower = (Node(b"", b"", ROOT, position, 1) for position in (1, 2))
    queue.push(upper)
    queue.push(lower)
    assert [queue.pop(), queue.pop()] == [lower, upper]


def test_checkpoints_go_in_order_of_use_and_locked_ones_are_passed_over(tree):
    nodes = [grow(tree, [value], checkpoint_slot=value) for value in (1, 2, 3)]
    tree.touch(nodes[0])
    tree.hold(nodes[1])
    tree.lock_checkpoint(nodes[1])
    order = tree.checkpoints
    assert isinstance(order, CheckpointOrder)
    assert order.oldest_unlocked(3) == [nodes[2], nodes[0]]
    assert order.oldest_unlocked(1) == [nodes[2]]
    assert tree.drop_checkpoint(nodes[2]) == 3
    tree.check_invariants()
    assert order.oldest_unlocked(3) == [nodes[0]]


def test_the_root_of_a_namespace_goes_with_its_last_child(tree):
    grow(tree, [1], namespace="a")
    grow(tree, [1, 2], namespace="a")
    grow(tree, [1], namespace="b")
    assert set(tree.roots) == {"a", "b"}
    assert evict_order(tree) == [2, 1, 1]
    assert not tree.roots
    assert tree.num_nodes == tree.num_kv == 0
