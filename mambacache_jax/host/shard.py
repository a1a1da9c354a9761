"""One index space, as a data-parallel rank has it: a tree, the allocators of its two pools, and its counts.

`PrefixCache` is the way in; here are the calls that change a tree and its allocators together.
"""

import operator
from collections.abc import Iterable

import numpy as np

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import StampMismatch
from mambacache_jax.host.allocator import SlotAllocator, Slots
from mambacache_jax.host.events import EventLog
from mambacache_jax.host.key import (
    TOKEN_BYTES,
    Stamp,
    TokenBuffer,
    Tokens,
    checked_bytes,
    hash_at,
)
from mambacache_jax.host.namespace import EVERY, AnyNamespace, Every, check_namespace
from mambacache_jax.host.node import NO_KV, Node, Root
from mambacache_jax.host.results import Evicted, Inserted, Lease
from mambacache_jax.host.stats import Counts, Sizes
from mambacache_jax.host.tree import RadixTree

MAX_NAMESPACES = 4096
"""Namespaces whose counts are kept apart; past that, one without nodes is counted in `Shard.others`."""


class Shard:
    """A tree with its allocators.

    Attributes:
      index: its number.
      kv: the KV pool's allocator.
      ssm: the SSM pool's.
      tree: the nodes.
      counts: by namespace.
      others: of namespaces not kept apart any more.
      log: events; None where nobody asked for them.
    """

    def __init__(self, index: int, config: CacheConfig, kv: SlotAllocator, ssm: SlotAllocator) -> None:
        self.index, self.kv, self.ssm = index, kv, ssm
        self.tree = RadixTree(config.page_size)
        self.counts: dict[AnyNamespace, Counts] = {}
        self.others = Counts()
        self.log = EventLog(self.tree, config.page_size) if config.events else None
        self._page_size, self._path_cap = config.page_size, config.max_checkpoints_per_path

    def root(self, namespace: AnyNamespace) -> Root | None:
        """The root of a namespace; None if it has no nodes.

        Raises:
          ValueError: this is no namespace.
        """
        try:
            root = self.tree.roots.get(namespace)
        except TypeError:  # It cannot be hashed.
            root = None
        if root is None or (root.namespace is not namespace and type(root.namespace) is not type(namespace)):
            check_namespace(namespace)
        return root

    def counts_of(self, namespace: AnyNamespace, stays: bool) -> Counts:
        """The counts of a namespace, made if need be; `stays` if it is about to have nodes."""
        counts = self.counts.get(namespace)
        if counts is None:
            if not stays and len(self.counts) >= MAX_NAMESPACES:
                return self.others
            counts = self.counts[namespace] = Counts()
        return counts

    def insert(
        self,
        tokens: Tokens,
        kv_slots: Slots,
        checkpoint_slot: int,
        namespace: AnyNamespace,
        stamp: Stamp | None,
        kv_start: int | None,
        length: int | None,
        lease: Lease | None,
    ) -> Inserted:
        """See `PrefixCache.insert`."""
        key = tokens.data if type(tokens) is TokenBuffer else checked_bytes(tokens)
        tree, page_size = self.tree, self._page_size
        num_tokens = len(key) // TOKEN_BYTES
        if length is not None:
            if not 0 <= length <= num_tokens:
                raise ValueError(f"length must be in [0, {num_tokens}], the tokens given, got {length}.")
            num_tokens = length
        end = num_tokens - num_tokens % page_size
        if lease is None or lease.node is None:
            above = root = self.root(namespace)
            kv_start = kv_start or 0
        else:
            above = self._leased_node(lease, key, num_tokens, namespace, kv_start)
            root, kv_start = above.root, above.position
        slots = self.caller_slots(kv_slots, kv_start, num_tokens)
        path, cut, reached = tree.walk(key, end * TOKEN_BYTES, above)
        if reached < kv_start and reached < end:
            raise ValueError(f"The tree has {reached} of these tokens, and kv_start says {kv_start}.")
        canonical = fresh = slots if end == num_tokens else slots[: max(0, end - kv_start)]
        duplicates = NO_KV
        if reached > kv_start:
            overlap, canonical = reached - kv_start, canonical.copy()
            canonical[:overlap] = _tree_slots(path, cut, kv_start, reached)
            duplicates, fresh = self._differing(slots[:overlap], canonical[:overlap]), canonical[overlap:]
        if checkpoint_slot:
            checkpoint_slot = operator.index(checkpoint_slot)
            self.ssm.validate_one(checkpoint_slot)
            if not num_tokens or end != num_tokens:
                self._raise_position(num_tokens)
            if stamp is not None and not stamp.is_of(tokens, num_tokens):
                raise StampMismatch(
                    f"The checkpoint has the stamp {stamp}, and these tokens have "
                    f"{Stamp(num_tokens, hash_at(tokens, num_tokens))}: it is the state of others."
                )
        # This is the last that can fail, and what fails changes nothing.
        self.kv.exchange(duplicates, fresh)
        counts = self.counts_of(namespace, end > 0) if root is None else root.counts
        counts.inserts += 1
        counts.duplicate_kv += len(duplicates)
        if cut is not None:
            upper = tree.split(cut, reached)
            path.append(upper)
            if self.log is not None:
                self.log.split(upper, cut)
        node = path[-1] if path else above if end else None
        if reached < end:
            run = key[reached * TOKEN_BYTES : end * TOKEN_BYTES]
            node = tree.add_leaf(node or tree.root(namespace, counts), run, fresh.tobytes())
            if self.log is not None:
                self.log.stored(node)
        adopted = False
        if checkpoint_slot:
            assert node is not None, "a checkpoint was let in at position 0."
            if node.checkpoint_slot:
                counts.occupied += 1
            else:
                adopted = True
                self._adopt(node, checkpoint_slot)
        return Inserted(reached, canonical, duplicates, adopted, node, self.index, key)

    def caller_slots(self, kv_slots: Slots, kv_start: int, num_tokens: int) -> np.ndarray:
        """The slots that an insert was given, int32, of the right number."""
        if kv_start < 0 or kv_start % self._page_size:
            raise ValueError(f"kv_start must be a multiple of page_size={self._page_size}, got {kv_start}.")
        slots = self.kv.as_int32(kv_slots)
        if len(slots) != num_tokens - kv_start:
            raise ValueError(f"{len(slots)} KV slots given for the positions {kv_start} to {num_tokens}.")
        return slots

    def evict(self, kv: int, ssm: int) -> Evicted:
        """See `PrefixCache.evict`."""
        freed = self._evict_leaves(kv) if kv > 0 else Evicted(0, 0)
        victims = self.tree.checkpoints.oldest_unlocked(ssm - freed.ssm) if freed.ssm < ssm else []
        for node in victims:
            self.drop_checkpoint(node)
            node.root.counts.ssm_evicted += 1
        return Evicted(freed.kv, freed.ssm + len(victims))

    def drop_checkpoint(self, node: Node) -> None:
        """Makes a node a tombstone and frees the slot; the checkpoint must not be locked."""
        self.ssm.free_one(node.checkpoint_slot)
        self.tree.drop_checkpoint(node)
        if self.log is not None:
            self.log.checkpoint_removed(node)

    def reset(self, namespace: AnyNamespace | Every) -> None:
        """See `PrefixCache.reset`; no lease but those of pins may be left, and those are gone already."""
        tree = self.tree
        if namespace is EVERY:
            for root in tree.roots.values():
                root.removed = True
            self.kv.free_every_adopted(lambda: _kv_slots(tree.nodes()))
            self.ssm.free_every_adopted(lambda: _states(tree.nodes()))
            tree.clear()
            if self.log is not None:
                self.log.cleared()
        elif (root := self.root(namespace)) is not None:
            nodes = list(tree.nodes(root))
            self.kv.free_adopted(_kv_slots(nodes))
            if len(states := _states(nodes)):
                self.ssm.free_adopted(states)
            tree.remove_root(root, nodes)
            self._forget_counts(root)
            if self.log is not None:
                for node in nodes:
                    self.log.removed(node)

    def sizes(self, namespace: AnyNamespace | Every) -> Sizes:
        """What there is now: for every namespace at once without a walk, for one with."""
        tree, roots = self.tree, self.tree.roots
        if namespace is EVERY:
            return Sizes(
                nodes=tree.num_nodes,
                tombstones=tree.num_nodes - len(tree.checkpoints),
                kv_cached=tree.num_kv,
                kv_protected=tree.protected_kv,
                ssm_cached=len(tree.checkpoints),
                ssm_protected=tree.protected_ssm,
                leases=sum(root.leases for root in roots.values()),
                pins=sum(root.pins for root in roots.values()),
            )
        if (root := self.root(namespace)) is None:
            return Sizes()
        nodes = list(tree.nodes(root))
        states = [node for node in nodes if node.checkpoint_slot]
        return Sizes(
            nodes=len(nodes),
            tombstones=len(nodes) - len(states),
            kv_cached=sum(len(node.kv) for node in nodes) // TOKEN_BYTES,
            kv_protected=sum(len(node.kv) for node in nodes if node.held) // TOKEN_BYTES,
            ssm_cached=len(states),
            ssm_protected=sum(1 for node in states if node.ssm_lock),
            leases=root.leases,
            pins=root.pins,
        )

    def check_invariants(self, request_kv: list[int], request_ssm: list[int]) -> None:
        """See `PrefixCache.check_invariants`."""
        self.tree.check_invariants()
        nodes = list(self.tree.nodes())
        self.kv.check_invariants([slot for node in nodes for slot in node.kv_slots.tolist()], request_kv)
        self.ssm.check_invariants([n.checkpoint_slot for n in nodes if n.checkpoint_slot], request_ssm)
        for namespace, root in self.tree.roots.items():
            assert self.counts.get(namespace) is root.counts, f"the counts of {namespace!r} are kept twice."
        if self.log is not None:
            self.log.check_invariants()

    def _evict_leaves(self, kv: int) -> Evicted:
        popped = self.tree.pop_leaves(kv)
        if not popped:
            return Evicted(0, 0)
        slots = _kv_slots(popped)
        states = [leaf.checkpoint_slot for leaf in popped if leaf.checkpoint_slot]
        self.kv.free_adopted(slots)
        if len(states) == 1:
            self.ssm.free_one(states[0])
        elif states:
            self.ssm.free_adopted(np.array(states, np.int32))
        for leaf in popped:
            root = leaf.root
            root.counts.kv_evicted += len(leaf.kv) // TOKEN_BYTES
            if leaf.checkpoint_slot:
                root.counts.ssm_lost_with_kv += 1
            if self.log is not None:
                self.log.removed(leaf)
            if not root.children:
                self._forget_counts(root)
        return Evicted(len(slots), len(states))

    def _forget_counts(self, root: Root) -> None:
        """Where there are too many namespaces, those that have no nodes any more are not kept apart."""
        if len(self.counts) > MAX_NAMESPACES and root.namespace in self.counts:
            self.others.add(self.counts.pop(root.namespace))

    def _keep_path_cap(self, newest: Node, cap: int) -> None:
        """Drops the shallowest checkpoints past the cap that nobody is likely to resume.

        The newest one, those where paths part, and those that a lease holds stay, cap or not.
        """
        with_state: list[Node] = []
        node = newest
        while (parent := node.parent) is not None:
            if node.checkpoint_slot:
                with_state.append(node)
            node = parent
        excess = len(with_state) - cap
        for node in reversed(with_state[1:]):
            if excess <= 0:
                return
            if len(node.children) == 1 and not node.ssm_lock:
                self.drop_checkpoint(node)
                node.root.counts.path_cap += 1
                excess -= 1

    def _leased_node(
        self, lease: Lease, key: bytes, num_tokens: int, namespace: AnyNamespace, kv_start: int | None
    ) -> Node:
        """The node that a lease holds, once it is sure that these tokens go on from it."""
        node = lease.node
        assert node is not None, "a lease on nothing starts at the root."
        if lease.released:
            raise ValueError(f"{lease} has been released already.")
        root = node.root
        if root.owner is not self.tree:
            raise ValueError(f"{lease} holds nothing of shard {self.index} of this cache.")
        if namespace is not root.namespace and namespace != root.namespace:
            raise ValueError(f"{lease} holds a prefix of {root.namespace!r}, not of {namespace!r}.")
        end = node.position * TOKEN_BYTES
        if not lease.key:
            raise ValueError(f"{lease} holds a node that its match leaves inside: insert without it.")
        if num_tokens < node.position or not _same_start(key, lease.key, end):
            raise ValueError(f"These {num_tokens} tokens do not begin with the prefix of {lease}.")
        if kv_start is not None and kv_start != node.position:
            raise ValueError(f"kv_start is {kv_start}, and {lease} ends at {node.position}: leave it out.")
        return node

    def _differing(self, mine: np.ndarray, canonical: np.ndarray) -> np.ndarray:
        """The caller's slots of the pages whose slots are not the tree's."""
        differs = mine != canonical
        if self._page_size > 1:
            differs = np.repeat(differs.reshape(-1, self._page_size).any(axis=1), self._page_size)
        return mine[differs]

    def _adopt(self, node: Node, checkpoint_slot: int) -> None:
        """The tree takes over a checkpoint for a tombstone."""
        self.ssm.adopt_one(checkpoint_slot)
        self.tree.set_checkpoint(node, checkpoint_slot)
        node.root.counts.adopted += 1
        if self.log is not None:
            self.log.checkpoint_stored(node)
        if self._path_cap is not None:
            self._keep_path_cap(node, self._path_cap)

    def _raise_position(self, position: int) -> None:
        raise StampMismatch(
            f"A checkpoint belongs at a positive multiple of page_size={self._page_size}, not at {position}."
        )


class Shards(dict[int, Shard]):
    """Shards by number; a wrong number is the caller's mistake, and says so."""

    def __missing__(self, shard: int) -> Shard:
        raise ValueError(f"There is no shard {shard!r}; there are {len(self)}, counted from 0.")


def _same_start(one: bytes, other: bytes, end: int) -> bool:
    """Whether the first `end` bytes of both, which have as many, are the same."""
    # A copy of the bytes costs less than the arrays that comparing them in place would need.
    return one is other or one.startswith(other[:end])


def _kv_slots(nodes: Iterable[Node]) -> np.ndarray:
    """KV slots of all these nodes, int32."""
    return np.frombuffer(b"".join([node.kv for node in nodes]), np.int32)


def _states(nodes: Iterable[Node]) -> np.ndarray:
    """Checkpoint slots of those of these nodes that have one, int32."""
    return np.array([node.checkpoint_slot for node in nodes if node.checkpoint_slot], np.int32)


def _tree_slots(path: list[Node], cut: Node | None, start: int, end: int) -> np.ndarray:
    """The tree's KV slots of positions `[start, end)` along a walk."""
    nodes = [node for node in path if node.position > start]
    if cut is not None:
        nodes.append(cut)
    first = nodes[0].position - len(nodes[0].kv) // TOKEN_BYTES
    return np.frombuffer(b"".join([node.kv for node in nodes]), np.int32)[start - first : end - first]
