"""`PrefixCache`: which prefixes have KV and a checkpoint, who owns each slot, and what is evicted for whom.

It moves no data. A caller matches a prompt, locks what it found, allocates slots for the rest, computes on
the device, and inserts what it computed; the tree then owns those slots. Every method completes, or raises
with nothing changed.
"""

import dataclasses
import operator
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots, StampMismatch
from mambacache_jax.host.allocator import SlotAllocator, Slots
from mambacache_jax.host.key import TOKEN_BYTES, Stamp, Tokens, token_bytes
from mambacache_jax.host.node import NO_KV, Node
from mambacache_jax.host.results import Evicted, Inserted, Lease, Match
from mambacache_jax.host.stats import CacheStats, Counts, Decode, render, to_dict
from mambacache_jax.host.tree import RadixTree


class PrefixCache:
    """A radix tree over prompts, and the allocators of both pools.

    Attributes:
      config: sizes and rules.
      kv: the KV pool's allocator; allocate through the cache, which evicts as needed.
      ssm: the SSM pool's, likewise.
    """

    def __init__(self, config: CacheConfig) -> None:
        if not config.prefix_caching and type(self) is PrefixCache:
            raise ValueError("A PrefixCache keeps prefixes; use make_prefix_cache for prefix_caching=False.")
        self.config = config
        self.kv = SlotAllocator(config.num_kv_slots, config.page_size)
        self.ssm = SlotAllocator(config.num_ssm_slots)
        self._page_size = config.page_size
        self._tree = RadixTree(config.page_size)
        self._counts = Counts()

    @property
    def evictable_kv(self) -> int:
        """KV slots of the tree that no lease holds."""
        return self._tree.num_kv - self._tree.protected_kv

    @property
    def evictable_ssm(self) -> int:
        """Checkpoints that no lease holds."""
        return len(self._tree.checkpoints) - self._tree.protected_ssm

    def match(self, tokens: Tokens, namespace: Hashable = None, max_len: int | None = None) -> Match:
        """Finds the longest prefix that can be resumed. Changes the matched node's recency and nothing else.

        Args:
          tokens: a prompt.
          namespace: the same tokens under another namespace never match.
          max_len: look at so many tokens at most; `len(prompt) - 1` leaves one to compute logits from.
        """
        key = token_bytes(tokens)
        count = len(key) // TOKEN_BYTES
        if max_len is not None:
            if max_len < 0:
                raise ValueError(f"max_len must not be negative, got {max_len}.")
            count = min(count, max_len)
        end = (count - count % self._page_size) * TOKEN_BYTES
        path, _, kv_len = self._tree.walk(key, end, namespace)
        while path and not path[-1].checkpoint_slot:
            path.pop()
        counts = self._counts
        counts.matches += 1
        counts.queried_tokens += count
        counts.kv_matched_tokens += kv_len
        if not path:
            return Match(0, NO_KV, 0, kv_len, self._tree.roots[None])
        node = path[-1]
        counts.hit_tokens += node.position
        self._tree.touch(node)
        kv_slots = np.concatenate([step.kv_slots for step in path]) if len(path) > 1 else node.kv_slots.copy()
        return Match(node.position, kv_slots, node.checkpoint_slot, kv_len, node)

    def lock(self, where: Match | Inserted, ssm: bool = True) -> Lease:
        """Keeps what a match or an insert found from eviction, until `unlock`.

        The KV of the node's path is held. With `ssm` the checkpoint at its end is locked too, and so is one
        that a tombstone gets while the lease lasts; without, the checkpoint may be evicted under the lease.

        Raises:
          ValueError: the node, or the checkpoint that a match named, has been evicted since.
        """
        node = where.node
        if node.removed:
            raise ValueError(f"{node} has been evicted since it was found: match again, and lock at once.")
        if node.parent is None:
            return Lease(node, False)
        if ssm and isinstance(where, Match) and node.checkpoint_slot != where.checkpoint_slot:
            raise ValueError(
                f"The checkpoint in slot {where.checkpoint_slot} at position {node.position} has been "
                f"evicted since it was found: match again, and lock at once."
            )
        self._tree.hold(node)
        if ssm:
            self._tree.lock_checkpoint(node)
        return Lease(node, ssm)

    def relax(self, lease: Lease) -> Lease:
        """Releases a lease's checkpoint lock and keeps its KV lock; returns the same lease."""
        self._check_unreleased(lease)
        if lease.ssm:
            lease.ssm = False
            self._tree.unlock_checkpoint(lease.node)
        return lease

    def unlock(self, lease: Lease) -> None:
        """Releases exactly what the lease locked.

        Raises:
          ValueError: it has been released already.
        """
        self.relax(lease)
        lease.released = True
        self._tree.release(lease.node)

    def insert(
        self,
        tokens: Tokens,
        kv_slots: Slots,
        checkpoint_slot: int = 0,
        *,
        namespace: Hashable = None,
        stamp: Stamp | None = None,
        kv_start: int = 0,
    ) -> Inserted:
        """Hands computed tokens to the tree, which owns their slots from then on.

        What the tree had already keeps its recency: only a match shows that something was of use.
        Where the tree has a position already and the caller's slot is another one, the caller's is a
        duplicate and is freed. What lies past the last whole page stays the caller's.

        Args:
          tokens: all tokens from position 0.
          kv_slots: the caller's own KV slots of `[kv_start, len(tokens))`, or the tree's where it has them.
          checkpoint_slot: the caller's own SSM slot that holds the state after `tokens`; 0 for none. Adopted
            unless the node has a checkpoint already.
          namespace: see `match`.
          stamp: what the checkpoint was made from; counted from `tokens` if left out, which checks nothing.
          kv_start: positions below, whole pages, are known to be in the tree, and held by a lease.

        Raises:
          StampMismatch: the checkpoint is the state of other tokens, or lies inside a page.
          ValueError: lengths do not fit, a slot is not the caller's, or the tree lacks positions below
            `kv_start`. Nothing was changed, as after a StampMismatch.
        """
        key, tree = token_bytes(tokens), self._tree
        checkpoint_slot = operator.index(checkpoint_slot)
        num_tokens = len(key) // TOKEN_BYTES
        end = num_tokens - num_tokens % self._page_size
        slots = self._caller_slots(kv_slots, kv_start, num_tokens)
        path, cut, reached = tree.walk(key, end * TOKEN_BYTES, namespace)
        if reached < min(kv_start, end):
            raise ValueError(f"The tree has {reached} of these tokens, and kv_start says {kv_start}.")
        overlap = max(0, reached - kv_start)
        canonical = slots[: max(0, end - kv_start)].copy()
        duplicates = NO_KV
        if overlap:
            canonical[:overlap] = self._tree_slots(path, cut, kv_start, reached)
            duplicates = self._differing(slots[:overlap], canonical[:overlap])
        fresh = canonical[overlap:]
        mine = np.concatenate([duplicates, fresh]) if len(duplicates) else fresh
        pages = self.kv.validate(mine) if len(mine) else NO_KV
        token_hash = 0
        if checkpoint_slot:
            self.ssm.validate_one(checkpoint_slot)
            token_hash = self._checked_hash(path, key, stamp)

        if cut is not None:
            path.append(tree.split(cut, reached))
        node = path[-1] if path else tree.root(namespace) if end else tree.roots[None]
        num_duplicates = len(duplicates) // self._page_size
        if num_duplicates:
            self.kv.free_pages(pages[:num_duplicates])
        if len(fresh):
            self.kv.adopt_pages(pages[num_duplicates:])
            with memoryview(key) as view:
                run = bytes(view[reached * TOKEN_BYTES : end * TOKEN_BYTES])
            node = tree.add_leaf(node, run, fresh.copy())
        adopted = bool(checkpoint_slot) and not node.checkpoint_slot
        if adopted:
            self.ssm.adopt_one(checkpoint_slot)
            tree.set_checkpoint(node, checkpoint_slot, token_hash)
        counts = self._counts
        counts.inserts += 1
        counts.duplicate_kv += len(duplicates)
        counts.adopted += adopted
        counts.refused += bool(checkpoint_slot) and not adopted
        return Inserted(reached, canonical, duplicates, adopted, node)

    def allocate_kv(self, num_slots: int) -> np.ndarray:
        """Takes KV slots, whole pages, evicting the least recently used as needed; an int32 copy.

        Raises:
          OutOfSlots: evicting all that can be would not do; nothing was changed.
        """
        missing = num_slots - self.kv.num_free
        if missing > 0 and num_slots % self._page_size == 0:
            if missing > self.evictable_kv:
                raise OutOfSlots(
                    f"KV pool: {num_slots} slots needed, {self.kv.num_free} free and "
                    f"{self.evictable_kv} evictable of {self.kv.num_slots}. "
                    f"Finish a request, or raise CacheConfig.num_kv_slots."
                )
            self.evict(kv=missing)
        return self.kv.allocate(num_slots)

    def allocate_ssm(self, num_slots: int = 1) -> np.ndarray:
        """Takes SSM slots, evicting the least recently used checkpoints as needed; an int32 copy.

        Raises:
          OutOfSlots: evicting all that can be would not do; nothing was changed.
        """
        missing = num_slots - self.ssm.num_free
        if missing > 0:
            if missing > self.evictable_ssm:
                raise OutOfSlots(
                    f"SSM pool: {num_slots} slots needed, {self.ssm.num_free} free and "
                    f"{self.evictable_ssm} evictable of {self.ssm.num_slots}. "
                    f"Finish a request, or raise CacheConfig.num_ssm_slots."
                )
            self.evict(ssm=missing)
        return self.ssm.allocate(num_slots)

    def free_kv(self, slots: Slots) -> None:
        """Takes back KV slots that the caller owns, whole pages; ValueError for any others."""
        self.kv.free(slots)

    def free_ssm(self, slots: Slots) -> None:
        """Takes back SSM slots that the caller owns; ValueError for any others."""
        self.ssm.free(slots)

    def evict(self, kv: int = 0, ssm: int = 0) -> Evicted:
        """Frees at least so many slots of the tree, or as many as no lease holds.

        KV goes leaf by leaf, each whole and with its checkpoint; a parent left without children is a leaf
        from then on. Checkpoints go one by one and leave tombstones: their KV stays.
        """
        if kv < 0 or ssm < 0:
            raise ValueError(f"Numbers of slots must not be negative, got kv={kv} and ssm={ssm}.")
        freed_kv = freed_ssm = 0
        runs = []
        while freed_kv < kv and (leaf := self._tree.pop_leaf()) is not None:
            runs.append(leaf.kv_slots)
            freed_kv += len(leaf.kv_slots)
            if leaf.checkpoint_slot:
                self.ssm.free_one(leaf.checkpoint_slot)
                freed_ssm += 1
        if runs:
            self.kv.free_adopted(runs[0] if len(runs) == 1 else np.concatenate(runs))
        self._counts.kv_evicted += freed_kv
        self._counts.ssm_lost_with_kv += freed_ssm
        if freed_ssm < ssm:
            victims = self._tree.checkpoints.oldest_unlocked(ssm - freed_ssm)
            for node in victims:
                self.ssm.free_one(self._tree.drop_checkpoint(node))
            self._counts.ssm_evicted += len(victims)
            freed_ssm += len(victims)
        return Evicted(freed_kv, freed_ssm)

    def reset(self) -> None:
        """Forgets every prefix. Slots that requests own stay theirs.

        Raises:
          ValueError: a lease holds some of them. End or preempt the requests first.
        """
        if self._tree.protected_kv:
            raise ValueError(
                f"Leases hold {self._tree.protected_kv} KV slots of the tree: unlock them before a reset."
            )
        nodes = list(self._tree.nodes())
        for node in nodes:
            node.removed = True
            if node.checkpoint_slot:
                self.ssm.free_one(node.checkpoint_slot)
        if nodes:
            self.kv.free_adopted(np.concatenate([node.kv_slots for node in nodes]))
        self._tree.clear()

    def stats(self) -> CacheStats:
        """Counts since the start and sizes now."""
        tree = self._tree
        return CacheStats(
            **dataclasses.asdict(self._counts),
            nodes=tree.num_nodes,
            tombstones=tree.num_nodes - len(tree.checkpoints),
            kv_total=self.kv.num_slots,
            kv_used=self.kv.num_used,
            kv_cached=tree.num_kv,
            kv_protected=tree.protected_kv,
            ssm_total=self.ssm.num_slots,
            ssm_used=self.ssm.num_used,
            ssm_cached=len(tree.checkpoints),
            ssm_protected=tree.protected_ssm,
        )

    def render(self, decode: Decode | None = None) -> str:
        """The tree as text, a line a node; `decode` turns a node's int32 tokens into what is shown."""
        return render(self._tree, decode)

    def to_dict(self) -> dict[str, Any]:
        """The tree as dicts, lists and numbers that `json` can write."""
        return to_dict(self._tree)

    def check_invariants(self, request_kv: Iterable[int] = (), request_ssm: Iterable[int] = ()) -> None:
        """Recounts everything; raises AssertionError unless each slot has one owner and all sums agree.

        Args:
          request_kv: every KV slot that a request owns.
          request_ssm: every SSM slot that a request owns.
        """
        self._tree.check_invariants()
        nodes = list(self._tree.nodes())
        cached_kv = [slot for node in nodes for slot in node.kv_slots.tolist()]
        cached_ssm = [node.checkpoint_slot for node in nodes if node.checkpoint_slot]
        self.kv.check_invariants(cached_kv, list(request_kv))
        self.ssm.check_invariants(cached_ssm, list(request_ssm))

    def _caller_slots(self, kv_slots: Slots, kv_start: int, num_tokens: int) -> np.ndarray:
        if kv_start < 0 or kv_start % self._page_size:
            raise ValueError(f"kv_start must be a multiple of page_size={self._page_size}, got {kv_start}.")
        slots = self.kv.as_int32(kv_slots)
        if len(slots) != num_tokens - kv_start:
            raise ValueError(f"{len(slots)} KV slots given for the positions {kv_start} to {num_tokens}.")
        return slots

    def _tree_slots(self, path: list[Node], cut: Node | None, start: int, end: int) -> np.ndarray:
        """The tree's KV slots of positions `[start, end)` along a walk."""
        nodes = [node for node in path if node.position > start]
        if cut is not None:
            nodes.append(cut)
        slots = np.concatenate([node.kv_slots for node in nodes])
        first = nodes[0].position - len(nodes[0].kv_slots)
        return slots[start - first : end - first]

    def _differing(self, mine: np.ndarray, canonical: np.ndarray) -> np.ndarray:
        """The caller's slots of the pages whose slots are not the tree's."""
        differs = mine != canonical
        if self._page_size > 1:
            differs = np.repeat(differs.reshape(-1, self._page_size).any(axis=1), self._page_size)
        return mine[differs]

    def _checked_hash(self, path: list[Node], key: bytes | bytearray, stamp: Stamp | None) -> int:
        """Hash of `key`, once it is sure that a checkpoint with this stamp is the state after it."""
        position = len(key) // TOKEN_BYTES
        if not position or position % self._page_size:
            raise StampMismatch(
                f"A checkpoint belongs at a positive multiple of page_size={self._page_size}, "
                f"not at {position}."
            )
        token_hash = self._tree.hash_at(path, key, len(key))
        if stamp is not None and stamp != (position, token_hash):
            raise StampMismatch(
                f"The checkpoint was stamped {tuple(stamp)}, and these tokens are {(position, token_hash)}: "
                f"it is the state of others."
            )
        return token_hash

    def _check_unreleased(self, lease: Lease) -> None:
        if lease.released:
            raise ValueError(f"{lease} has been released already.")


class NullPrefixCache(PrefixCache):
    """The same allocators without a tree: nothing is found and nothing is kept."""

    def match(self, tokens: Tokens, namespace: Hashable = None, max_len: int | None = None) -> Match:
        """Finds nothing."""
        return Match(0, NO_KV, 0, 0, self._tree.roots[None])

    def insert(
        self,
        tokens: Tokens,
        kv_slots: Slots,
        checkpoint_slot: int = 0,
        *,
        namespace: Hashable = None,
        stamp: Stamp | None = None,
        kv_start: int = 0,
    ) -> Inserted:
        """Takes nothing over: every slot is still the caller's."""
        num_tokens = len(token_bytes(tokens)) // TOKEN_BYTES
        slots = self._caller_slots(kv_slots, kv_start, num_tokens)
        end = num_tokens - num_tokens % self._page_size
        return Inserted(0, slots[: max(0, end - kv_start)].copy(), NO_KV, False, self._tree.roots[None])


def make_prefix_cache(config: CacheConfig) -> PrefixCache:
    """A cache that keeps prefixes, or with `prefix_caching=False` one that keeps none."""
    return PrefixCache(config) if config.prefix_caching else NullPrefixCache(config)
