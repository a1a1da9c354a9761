"""Every check of `check_invariants()` notices the damage that it is there for, and says what it is."""

import pytest

from mambacache_jax.host import SlotAllocator
from mambacache_jax.host.allocator import USED
from mambacache_jax.host.node import Node, Root
from mambacache_jax.host.stats import Counts


class Damaged:
    """A cache with AB (a tombstone) above CD (checkpoint 1) and XY (checkpoint 2), and all of its insides."""

    def __init__(self, toy) -> None:
        self.toy = toy
        self.leaf = toy.put("ABCD").node
        toy.put("ABXY")
        self.top = self.leaf.parent
        self.root = self.top.parent
        self.shard = toy.cache._shards[0]
        self.tree = self.shard.tree
        self.toy.check()


@pytest.fixture
def damaged(toy) -> Damaged:
    return Damaged(toy)


def hold_child_only(d: Damaged) -> None:
    d.toy.cache.lock(d.toy.match("ABCD"), ssm=False)
    d.top.held, d.root.leases = 0, 0


def empty_leaf(d: Damaged) -> None:
    d.leaf.tokens, d.leaf.kv, d.leaf.position = b"", b"", d.top.position
    d.top.children = {b"": d.leaf}


def forget_in_queue(d: Damaged) -> None:
    d.leaf.queued = False
    d.tree._leaves._heap = [entry for entry in d.tree._leaves._heap if entry[1] is not d.leaf]


def refile(parent: Node, child: Node) -> None:
    parent.children = {b"none" if node is child else page: node for page, node in parent.children.items()}


DAMAGE = {
    "a root under another name": (lambda d: setattr(d.root, "namespace", "x"), "the root of None says 'x'"),
    "an empty root": (
        lambda d: d.tree.roots.update(x=Root("x", Counts())),
        "the root of 'x' is empty and still there",
    ),
    "a root that is held": (
        lambda d: setattr(d.root, "held", 1),
        r"is \(0, 0, 1, 0, None\)",
    ),
    "a root with a checkpoint": (lambda d: setattr(d.root, "checkpoint_slot", 1), r"is \(0, 1, 0, 0, None\)"),
    "a child of a root filed wrongly": (lambda d: refile(d.root, d.top), "filed under another page"),
    "a child of a root with another parent": (lambda d: setattr(d.top, "parent", d.leaf), "is a child of"),
    "another root": (lambda d: setattr(d.leaf, "root", Root(None, Counts())), "has another root"),
    "leases that nobody took": (lambda d: setattr(d.root, "leases", 1), "0 leases counted below None, not 1"),
    "a node that nobody held": (lambda d: setattr(d.top, "held", 1), "1 leases counted below None, not 0"),
    "more pins than leases": (lambda d: setattr(d.root, "pins", 1), "1 pins and 0 leases below None"),
    "fewer pins than none": (lambda d: setattr(d.root, "pins", -1), "-1 pins and 0 leases"),
    "a child filed wrongly": (lambda d: refile(d.top, d.leaf), "filed under another page"),
    "a child with another parent": (lambda d: setattr(d.leaf, "parent", d.root), "is a child of"),
    "a checkpoint out of order": (lambda d: d.tree.checkpoints.pop(d.leaf), "the order of checkpoints"),
    "a tombstone in order": (lambda d: d.tree.checkpoints.update({d.top: None}), "the order of checkpoints"),
    "a node queued twice": (
        lambda d: d.tree._leaves._heap.append(d.tree._leaves._heap[0]),
        "a node is queued twice",
    ),
    "a node that is queued unawares": (lambda d: setattr(d.leaf, "queued", False), "the queue of leaves"),
    "a leaf that cannot be evicted": (forget_in_queue, "can be evicted and is not queued"),
    "a wrong sum": (lambda d: setattr(d.tree, "num_kv", 3), r"are \(3, 3, 0, 0\), counted \(3, 6, 0, 0\)"),
    "a wrong number of nodes": (lambda d: setattr(d.tree, "num_nodes", 4), r"counted \(3, 6, 0, 0\)"),
    "a wrong sum of what is held": (lambda d: setattr(d.tree, "protected_kv", 2), "counted"),
    "a wrong sum of what is locked": (lambda d: setattr(d.tree, "protected_ssm", 1), "counted"),
    "a node that is gone": (lambda d: setattr(d.leaf, "removed", True), "marked as removed"),
    "an empty node": (empty_leaf, "has an empty run"),
    "too few slots": (lambda d: setattr(d.leaf, "kv", b""), "has 2 tokens"),
    "a node elsewhere": (lambda d: setattr(d.leaf, "position", 9), "is not where its parent ends"),
    "a child held alone": (hold_child_only, "is held 0 times, its children 1"),
    "a negative lock": (lambda d: setattr(d.leaf, "ssm_lock", -1), "has a checkpoint lock of -1"),
    "a lock without a lease": (
        lambda d: setattr(d.leaf, "ssm_lock", 1),
        "has 1 checkpoint locks and 0 leases",
    ),
    "counts kept twice": (lambda d: d.shard.counts.update({None: Counts()}), "counts of None are kept twice"),
    "KV slots that leaked": (lambda d: d.toy.cache.allocate_kv(1), r"requests own \[\].* have lost \[\d\]"),
    "an SSM slot that leaked": (lambda d: d.toy.cache.allocate_ssm(), r"have lost \[3\]"),
    "a KV slot of the tree that a request owns": (
        lambda d: d.toy.request_kv.add(1),
        r"requests own \[1\] without the allocator's knowledge",
    ),
    "an SSM slot of the tree that a request owns": (
        lambda d: d.toy.request_ssm.add(1),
        r"requests own \[1\] without the allocator's knowledge",
    ),
    "a slot of two nodes": (lambda d: setattr(d.leaf, "kv", d.top.kv), "the tree own a slot twice"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_seen_and_named(damaged, case):
    damage, message = DAMAGE[case]
    damage(damaged)
    with pytest.raises(AssertionError, match=message):
        damaged.toy.check()


def test_a_run_that_ends_inside_a_page_is_seen(make_toy):
    toy = make_toy(page_size=4)
    node = toy.put("ABCDEFGH", checkpoint=False).node
    node.tokens, node.kv, node.position = node.tokens[:24], node.kv[:24], 6
    with pytest.raises(AssertionError, match="a run of 6 tokens, no whole pages"):
        toy.check()


def damage_stack(allocator: SlotAllocator) -> None:
    allocator._stack[0] = 1


def damage_null_page(allocator: SlotAllocator) -> None:
    allocator._state[0] = USED


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_stack, r"the stack holds pages \[1, 3\], but \[3, 4\] are free"),
        (damage_null_page, "the null page has been given away"),
    ],
)
def test_damage_to_an_allocator_is_seen(damage, message):
    allocator = SlotAllocator(4)
    used = allocator.allocate(2).tolist()
    allocator.check_invariants([], used)
    damage(allocator)
    with pytest.raises(AssertionError, match=message):
        allocator.check_invariants([], used)
