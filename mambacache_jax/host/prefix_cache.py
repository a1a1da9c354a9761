"""`PrefixCache`: which prefixes have KV and a checkpoint, who owns each slot, and what is evicted for whom.

It moves no data. A caller matches a prompt, locks what it found, allocates slots for the rest, computes on
the device, and inserts what it computed; the tree then owns those slots. Every method completes, or raises
with nothing changed.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host import storage
from mambacache_jax.host.allocator import SlotAllocator, Slots
from mambacache_jax.host.borrowed import BorrowedSlots, CallerAllocator
from mambacache_jax.host.drawing import Decode, render, to_dict
from mambacache_jax.host.events import Event
from mambacache_jax.host.key import TOKEN_BYTES, Stamp, TokenBuffer, Tokens, token_bytes
from mambacache_jax.host.leases import Leases
from mambacache_jax.host.namespace import EVERY, AnyNamespace, Every
from mambacache_jax.host.node import NO_KV, Node, Root
from mambacache_jax.host.results import Evicted, Inserted, Lease, Match
from mambacache_jax.host.shard import Shard, Shards
from mambacache_jax.host.stats import SKIPS, CacheStats, Counts


class PrefixCache(Leases):
    """Radix trees over prompts, and the allocators of both pools: one of each for every shard.

    Shards share nothing: slots, prefixes and leases of one mean nothing in another. Whoever has one shard
    need not name it.

    Attributes:
      config: sizes and rules.
      kv: the KV pools' allocators, by shard; allocate through the cache, which evicts as needed.
      ssm: the SSM pools', likewise.
    """

    def __init__(
        self,
        config: CacheConfig,
        kv: Sequence[CallerAllocator] | None = None,
        ssm: Sequence[CallerAllocator] | None = None,
    ) -> None:
        """Makes an empty cache.

        Args:
          config: sizes and rules.
          kv: the caller's own allocators of KV slots, one a shard; None makes `SlotAllocator`s.
          ssm: the caller's own allocators of SSM slots, likewise.
        """
        if not config.prefix_caching and type(self) is PrefixCache:
            raise ValueError("A PrefixCache keeps prefixes; use make_prefix_cache for prefix_caching=False.")
        self.config = config
        self.kv = _allocators("kv", kv, config.num_shards, config.num_kv_slots, config.page_size)
        self.ssm = _allocators("ssm", ssm, config.num_shards, config.num_ssm_slots, 1)
        self._page_size = config.page_size
        shards = Shards(
            (index, Shard(index, config, self.kv[index], self.ssm[index]))
            for index in range(config.num_shards)
        )
        super().__init__(shards)

    def match(
        self, tokens: Tokens, namespace: AnyNamespace = None, max_len: int | None = None, *, shard: int = 0
    ) -> Match:
        """Finds the longest prefix that can be resumed. Changes the matched node's recency and nothing else.

        Args:
          tokens: a prompt.
          namespace: the same tokens under another namespace never match.
          max_len: look at so many tokens at most; `len(prompt) - 1` leaves one to compute logits from.
          shard: where to look.
        """
        s, root, key, path, _, kv_len, count = self._walk(tokens, namespace, max_len, shard)
        counts = s.counts_of(namespace, False) if root is None else root.counts
        counts.matches += 1
        counts.queried_tokens += count
        counts.kv_matched_tokens += kv_len
        while path and not path[-1].checkpoint_slot:
            path.pop()
        if not path:
            return Match(0, NO_KV, 0, kv_len, None, shard, key)
        node = path[-1]
        position = node.position
        counts.hit_tokens += position
        s.tree.touch(node)
        return Match(position, _slots_of(path), node.checkpoint_slot, kv_len, node, shard, key)

    def probe(
        self, tokens: Tokens, namespace: AnyNamespace = None, max_len: int | None = None, *, shard: int = 0
    ) -> Match:
        """What `match` would find; neither recency nor statistics can tell that it was asked."""
        _, _, key, path, _, kv_len, _ = self._walk(tokens, namespace, max_len, shard)
        while path and not path[-1].checkpoint_slot:
            path.pop()
        if not path:
            return Match(0, NO_KV, 0, kv_len, None, shard, key)
        node = path[-1]
        return Match(node.position, _slots_of(path), node.checkpoint_slot, kv_len, node, shard, key)

    def match_kv(
        self, tokens: Tokens, namespace: AnyNamespace = None, max_len: int | None = None, *, shard: int = 0
    ) -> Match:
        """All the KV of a prefix, whether or not a state follows, for a request that has its own state.

        Leaves recency and statistics alone: such a request has matched already. Lock it with `ssm=False`;
        where it ends inside a node, the whole node is held.
        """
        _, _, key, path, cut, kv_len, _ = self._walk(tokens, namespace, max_len, shard)
        if cut is not None and kv_len > cut.position - len(cut.kv) // TOKEN_BYTES:
            path.append(cut)
        if not path:
            return Match(0, NO_KV, 0, 0, None, shard, key)
        return Match(kv_len, _slots_of(path)[:kv_len], 0, kv_len, path[-1], shard, key)

    def insert(
        self,
        tokens: Tokens,
        kv_slots: Slots,
        checkpoint_slot: int = 0,
        *,
        namespace: AnyNamespace = None,
        stamp: Stamp | None = None,
        kv_start: int | None = None,
        length: int | None = None,
        lease: Lease | None = None,
        shard: int = 0,
    ) -> Inserted:
        """Hands computed tokens to the tree, which owns their slots from then on.

        What the tree had already keeps its recency: only a match shows that something was of use.
        Where the tree has a position already and the caller's slot is another one, the caller's is a
        duplicate and is freed. What lies past the last whole page stays the caller's.

        Args:
          tokens: all tokens from position 0.
          kv_slots: the caller's own KV slots of `[kv_start, length)`, or the tree's where it has them.
          checkpoint_slot: the caller's own SSM slot that holds the state after `length` tokens; 0 for none.
            Adopted unless the node has a checkpoint already.
          namespace: see `match`.
          stamp: what the checkpoint was made from; counted from `tokens` if left out, which checks nothing.
          kv_start: positions below, whole pages, are known to be in the tree; 0 if left out.
          lease: the caller's own on a prefix of the tokens. The tree goes on from there instead of comparing
            the prefix again, and `kv_start` is where it ends. A lease on nothing changes nothing.
          length: insert the first so many tokens; all if left out. Spares a growing request a copy.
          shard: whose slots they are.

        Raises:
          StampMismatch: the checkpoint is the state of other tokens, or lies inside a page.
          ValueError: lengths do not fit, a slot is not the caller's, or the tree lacks positions below
            `kv_start`. Nothing was changed, as after a StampMismatch.
        """
        return self._shards[shard].insert(
            tokens, kv_slots, checkpoint_slot, namespace, stamp, kv_start, length, lease
        )

    def allocate_kv(self, num_slots: int, *, shard: int = 0) -> np.ndarray:
        """Takes KV slots, whole pages, evicting the least recently used as needed; an int32 copy.

        Raises:
          OutOfSlots: evicting all that can be would not do; nothing was changed.
        """
        kv = self.kv[self._shards[shard].index]
        missing = num_slots - kv.num_free
        if missing > 0 and num_slots % self._page_size == 0:
            if missing > (evictable := self.evictable_kv(shard=shard)):
                raise OutOfSlots(
                    f"KV pool: {num_slots} slots needed, {kv.num_free} free and "
                    f"{evictable} evictable of {kv.num_slots}. "
                    f"Finish a request, or raise CacheConfig.num_kv_slots."
                )
            self._shards[shard].evict(missing, 0)
        return kv.allocate(num_slots)

    def allocate_ssm(self, num_slots: int = 1, *, shard: int = 0) -> np.ndarray:
        """Takes SSM slots, evicting the least recently used checkpoints as needed; an int32 copy.

        Raises:
          OutOfSlots: evicting all that can be would not do; nothing was changed.
        """
        ssm = self.ssm[self._shards[shard].index]
        missing = num_slots - ssm.num_free
        if missing > 0:
            if missing > (evictable := self.evictable_ssm(shard=shard)):
                raise OutOfSlots(
                    f"SSM pool: {num_slots} slots needed, {ssm.num_free} free and "
                    f"{evictable} evictable of {ssm.num_slots}. "
                    f"Finish a request, or raise CacheConfig.num_ssm_slots."
                )
            self._shards[shard].evict(0, missing)
        return ssm.allocate(num_slots)

    def free_kv(self, slots: Slots, *, shard: int = 0) -> None:
        """Takes back KV slots that the caller owns, whole pages; ValueError for any others."""
        self._shards[shard].kv.free(slots)

    def free_ssm(self, slots: Slots, *, shard: int = 0) -> None:
        """Takes back SSM slots that the caller owns; ValueError for any others."""
        self._shards[shard].ssm.free(slots)

    def evictable_kv(self, *, shard: int = 0) -> int:
        """KV slots of the tree that no lease holds."""
        tree = self._shards[shard].tree
        return tree.num_kv - tree.protected_kv

    def evictable_ssm(self, *, shard: int = 0) -> int:
        """Checkpoints that no lease holds."""
        tree = self._shards[shard].tree
        return len(tree.checkpoints) - tree.protected_ssm

    def evict(self, kv: int = 0, ssm: int = 0, *, shard: int = 0) -> Evicted:
        """Frees at least so many slots of the tree, or as many as no lease holds.

        KV goes leaf by leaf, each whole and with its checkpoint; a parent left without children is a leaf
        from then on. Checkpoints go one by one and leave tombstones: their KV stays.
        """
        if kv < 0 or ssm < 0:
            raise ValueError(f"Numbers of slots must not be negative, got kv={kv} and ssm={ssm}.")
        return self._shards[shard].evict(kv, ssm)

    def reset(self, namespace: AnyNamespace | Every = EVERY, *, shard: int | None = None) -> None:
        """Forgets every prefix, or those of one namespace. Pins end; slots that requests own stay theirs.

        Args:
          namespace: None is the default namespace, not all of them.
          shard: where; None for everywhere.

        Raises:
          ValueError: a lease that is no pin holds some of them. End or preempt the requests first.
        """
        shards = list(self._shards.values()) if shard is None else [self._shards[shard]]
        for s in shards:
            roots = s.tree.roots.values() if namespace is EVERY else [s.root(namespace)]
            held = sum(root.leases - root.pins for root in roots if root is not None)
            if held:
                raise ValueError(
                    f"{held} leases hold prefixes of the tree, {s.tree.protected_kv} KV slots with those of "
                    f"pins: unlock them before a reset."
                )
        self._end_pins(namespace, shard)
        for s in shards:
            s.reset(namespace)

    def events(self, *, shard: int = 0) -> list[Event]:
        """What changed since the last call, oldest first.

        Call it every step: past 65,536 events the log is dropped, and the next call tells the whole tree,
        after an `AllBlocksCleared`.

        Raises:
          ValueError: `CacheConfig.events` is off.
        """
        log = self._shards[shard].log
        if log is None:
            raise ValueError("Events are off: set CacheConfig.events=True.")
        return log.fetch()

    def count_skipped(
        self, reason: Literal["no_slot", "limit"], count: int = 1, *, namespace: AnyNamespace = None, shard=0
    ) -> None:
        """Counts checkpoints that the caller wanted and did not take; reasons as in `CacheStats.skipped`."""
        if reason not in ("no_slot", "limit"):
            raise ValueError(f"A caller skips a checkpoint for 'no_slot' or 'limit', got {reason!r}.")
        s = self._shards[shard]
        s.root(namespace)
        counts = s.counts_of(namespace, False)
        setattr(counts, reason, getattr(counts, reason) + count)

    def stats(self, namespace: AnyNamespace | Every = EVERY, *, shard: int | None = None) -> CacheStats:
        """Counts since the start and sizes now; those of one namespace cost a walk over its nodes."""
        shards = list(self._shards.values()) if shard is None else [self._shards[shard]]
        counts = Counts()
        sizes: dict[str, int] = {}
        for s in shards:
            if namespace is EVERY:
                for each in (*s.counts.values(), s.others):
                    counts.add(each)
            else:
                s.root(namespace)
                counts.add(s.counts.get(namespace, Counts()))
            for name, value in dataclasses.asdict(s.sizes(namespace)).items():
                sizes[name] = sizes.get(name, 0) + value
        counted = dataclasses.asdict(counts)
        return CacheStats(
            skipped={reason: counted.pop(reason) for reason in SKIPS},
            **counted,
            **sizes,
            kv_total=sum(s.kv.num_slots for s in shards),
            kv_used=sum(s.kv.num_used for s in shards),
            ssm_total=sum(s.ssm.num_slots for s in shards),
            ssm_used=sum(s.ssm.num_used for s in shards),
        )

    def render(self, decode: Decode | None = None, *, shard: int = 0) -> str:
        """The tree as text, a line a node; `decode` turns a node's int32 tokens into what is shown."""
        return render(self._shards[shard].tree, decode)

    def to_dict(self, *, shard: int = 0) -> dict[str, Any]:
        """The tree as dicts, lists and numbers that `json` can write."""
        return to_dict(self._shards[shard].tree)

    def save(self, path: str | Path) -> None:
        """Writes the trees of all shards to a file: prefixes, slots and recency; no leases, pins or counts.

        It goes with the pools' contents, which the caller saves, or into a bug report: it holds the tokens.
        """
        storage.save(path, self.config, [s.tree for s in self._shards.values()])

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: CacheConfig | None = None,
        kv: Sequence[CallerAllocator] | None = None,
        ssm: Sequence[CallerAllocator] | None = None,
    ) -> Self:
        """A cache with the trees of a file that `save` wrote: the same prefixes in the same slots.

        Args:
          path: the file.
          config: sizes and rules; those that were saved if left out. Pages must be of the same size, shards
            as many, and the pools large enough for the saved slots.
          kv: as in the constructor. The caller has taken the saved slots out of it already.
          ssm: likewise.

        Raises:
          ValueError: it is no such file, is damaged, or does not fit `config`.
        """
        saved = storage.read(path)
        cache = cls(saved.config if config is None else config, kv, ssm)
        storage.restore(saved, list(cache._shards.values()))
        return cache

    def check_invariants(
        self, request_kv: Iterable[int] = (), request_ssm: Iterable[int] = (), *, shard: int = 0
    ) -> None:
        """Recounts a shard; raises AssertionError unless each slot has one owner and all sums agree.

        Args:
          request_kv: every KV slot of the shard that a request owns.
          request_ssm: every SSM slot of the shard that a request owns.
          shard: which.
        """
        self._shards[shard].check_invariants(list(request_kv), list(request_ssm))

    def _walk(
        self, tokens: Tokens, namespace: AnyNamespace, max_len: int | None, shard: int
    ) -> tuple[Shard, Root | None, bytes, list[Node], Node | None, int, int]:
        """Where `RadixTree.walk` was done, on what, what it returned, and how many tokens it looked at."""
        s = self._shards[shard]
        key = tokens.data if type(tokens) is TokenBuffer else token_bytes(tokens)
        count = len(key) // TOKEN_BYTES
        if max_len is not None and max_len < count:
            if max_len < 0:
                raise ValueError(f"max_len must not be negative, got {max_len}.")
            count = max_len
        end = (count - count % self._page_size) * TOKEN_BYTES
        root = s.root(namespace)
        path, cut, kv_len = s.tree.walk(key, end, root)
        return s, root, key, path, cut, kv_len, count


def _allocators(
    name: str, callers: Sequence[CallerAllocator] | None, num_shards: int, num_slots: int, page_size: int
) -> tuple[SlotAllocator, ...]:
    if callers is None:
        return tuple(SlotAllocator(num_slots, page_size) for _ in range(num_shards))
    if len(callers) != num_shards:
        raise ValueError(
            f"{name} must have an allocator for each of {num_shards} shards, got {len(callers)}."
        )
    return tuple(
        caller if isinstance(caller, SlotAllocator) else BorrowedSlots(caller, num_slots, page_size)
        for caller in callers
    )


def _slots_of(path: list[Node]) -> np.ndarray:
    """The KV slots of a path. What a node keeps is never written, so one node's need no copy."""
    return np.frombuffer(path[0].kv if len(path) == 1 else b"".join([node.kv for node in path]), np.int32)
