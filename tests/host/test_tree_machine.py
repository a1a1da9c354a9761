"""Whatever is matched, locked, inserted and evicted in whatever order, the cache equals a slow model of it.

The model keeps whole token lists and no tree: which slots hold the last page of each prefix, where nodes end,
and when each was used, stamping whole paths. Eviction must pick the very same victims.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host import Lease, Match, PrefixCache, TokenBuffer

Path = tuple[str | None, tuple[int, ...]]

NAMESPACES = st.sampled_from([None, None, "tenant"])
# Each letter twice, so that prompts share prefixes that end inside a page of 4 as well as at its end.
MORE = st.lists(st.integers(0, 1), max_size=4).map(lambda letters: [x for x in letters for _ in range(2)])
MAX_LEN = 16


@dataclasses.dataclass(eq=False)
class End:
    """The end of a node: a namespace and the tokens up to it."""

    path: Path
    slot: int = 0
    kv_use: int = 0
    ssm_use: int = 0
    alive: bool = True

    def covers(self, other: "End") -> bool:
        """Whether this is `other` or an ancestor of it."""
        (namespace, tokens), (other_namespace, other_tokens) = self.path, other.path
        return namespace == other_namespace and other_tokens[: len(tokens)] == tokens


@dataclasses.dataclass
class Held:
    """A lease as the model sees it; `end` is None for the root."""

    lease: Lease
    end: End | None
    ssm: bool


class Model:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[Path, list[int]] = {}
        self.ends: dict[Path, End] = {}
        self.held: list[Held] = []
        self.clock = 0

    def prefixes(self, namespace: str | None, tokens: Sequence[int]) -> Iterator[Path]:
        for length in range(self.page_size, len(tokens) + 1, self.page_size):
            yield namespace, tuple(tokens[:length])

    def slots(self, namespace: str | None, tokens: list[int]) -> list[int]:
        """The KV slots of a prefix that is in the cache, by position."""
        return [slot for path in self.prefixes(namespace, tokens) for slot in self.kv[path]]

    def kv_len(self, namespace: str | None, tokens: list[int]) -> int:
        return max((len(p[1]) for p in self.prefixes(namespace, tokens) if p in self.kv), default=0)

    def hit(self, namespace: str | None, tokens: list[int]) -> End | None:
        ends = [self.ends[p] for p in self.prefixes(namespace, tokens) if p in self.ends]
        return max((end for end in ends if end.slot), key=lambda end: len(end.path[1]), default=None)

    def use(self, end: End) -> None:
        self.clock += 1
        end.ssm_use = self.clock
        for other in self.ends.values():
            if other.covers(end):
                other.kv_use = self.clock

    def adopt(self, end: End, slot: int) -> None:
        self.clock += 1
        end.slot, end.ssm_use = slot, self.clock

    def is_held(self, end: End) -> bool:
        return any(held.end is not None and end.covers(held.end) for held in self.held)

    def is_locked(self, end: End) -> bool:
        return any(held.end is end and held.ssm for held in self.held)

    def run(self, end: End) -> list[Path]:
        """The pages of a node's own run: those below no shallower end."""
        above = [len(e.path[1]) for e in self.ends.values() if e is not end and e.covers(end)]
        return [p for p in self.prefixes(*end.path) if len(p[1]) > max(above, default=0)]

    def run_len(self, end: End) -> int:
        return len(self.run(end)) * self.page_size

    def evictable_kv(self) -> int:
        return sum(self.run_len(end) for end in self.ends.values() if not self.is_held(end))

    def evictable_ssm(self) -> int:
        return sum(1 for end in self.ends.values() if end.slot and not self.is_locked(end))

    def insert(self, namespace: str | None, tokens: list[int], kv_slots: list[int]) -> End | None:
        """`kv_slots` has a slot for every position; those that the cache has already stay as they are."""
        reached = self.kv_len(namespace, tokens)
        for length in {reached, len(tokens)} - {0}:
            path = namespace, tuple(tokens[:length])
            if path in self.ends:
                continue
            end = self.ends[path] = End(path)
            below = [other for other in self.ends.values() if end.covers(other)]
            end.kv_use = max(other.kv_use for other in below)
        for path in self.prefixes(namespace, tokens):
            if (length := len(path[1])) > reached:
                self.kv[path] = kv_slots[length - self.page_size : length]
        if not tokens:
            return None
        end = self.ends[namespace, tuple(tokens)]
        if len(tokens) > reached:
            self.use(end)
        return end

    def evict(self, kv: int, ssm: int) -> tuple[int, int]:
        freed_kv = freed_ssm = 0
        while freed_kv < kv:
            free = [end for end in self.ends.values() if not self.is_held(end)]
            leaves = [
                end for end in free if not any(end.covers(o) for o in self.ends.values() if o is not end)
            ]
            if not leaves:
                break
            victim = min(leaves, key=lambda end: end.kv_use)
            freed_kv += self.run_len(victim)
            for path in self.run(victim):
                del self.kv[path]
            del self.ends[victim.path]
            victim.alive = False
            freed_ssm += bool(victim.slot)
        for end in sorted(self.ends.values(), key=lambda end: end.ssm_use):
            if freed_ssm < ssm and end.slot and not self.is_locked(end):
                end.slot = 0
                freed_ssm += 1
        return freed_kv, freed_ssm

    def clear(self) -> None:
        for end in self.ends.values():
            end.alive = False
        self.kv, self.ends = {}, {}


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    num_kv_slots = 36

    @initialize()
    def start(self) -> None:
        self.cache = PrefixCache(CacheConfig(self.num_kv_slots, 6, self.page_size, track_interval=256))
        self.model = Model(self.page_size)
        self.matches: list[tuple[Match, End | None]] = []
        self.kv: list[int] = []
        self.ssm: list[int] = []

    def pages(self, length: int) -> int:
        return -(-length // self.page_size) * self.page_size

    def prompt(self, data: st.DataObject, namespace: str | None) -> list[int]:
        """Part of a prompt that the cache knows, or of none, and then tokens of its own."""
        known = [path[1] for path in self.model.ends if path[0] == namespace]
        base = data.draw(st.sampled_from([*known, ()]), label="base")
        kept = base[: data.draw(st.integers(0, len(base)).map(lambda cut: len(base) - cut), label="kept")]
        return [*kept, *data.draw(MORE, label="more")][:MAX_LEN]

    def allocate(self, num_kv: int, num_ssm: int) -> bool:
        """Takes slots, which the model must find possible exactly when the cache does."""
        missing = num_kv - self.cache.kv[0].num_free
        if missing > self.model.evictable_kv():
            with pytest.raises(OutOfSlots, match=f"KV pool: {num_kv} slots needed"):
                self.cache.allocate_kv(num_kv)
            return False
        self.model.evict(kv=missing, ssm=0)
        self.kv.extend(self.cache.allocate_kv(num_kv).tolist())
        missing = num_ssm - self.cache.ssm[0].num_free
        if missing > self.model.evictable_ssm():
            with pytest.raises(OutOfSlots, match=f"SSM pool: {num_ssm} slots needed"):
                self.cache.allocate_ssm(num_ssm)
            return False
        self.model.evict(kv=0, ssm=missing)
        self.ssm.extend(self.cache.allocate_ssm(num_ssm).tolist())
        return True

    @rule(namespace=NAMESPACES, cut=st.sampled_from([None, None, 0, 1, 3]), data=st.data())
    def match(self, namespace: str | None, cut: int | None, data: st.DataObject) -> None:
        tokens = self.prompt(data, namespace)
        max_len = None if cut is None else max(0, len(tokens) - cut)
        match = self.cache.match(TokenBuffer(tokens), namespace, max_len)
        seen = tokens[:max_len]
        end = self.model.hit(namespace, seen)
        kv_len = self.model.kv_len(namespace, seen)
        prefix_len = len(end.path[1]) if end else 0
        assert (match.prefix_len, match.kv_len) == (prefix_len, kv_len)
        assert match.branch_position == (kv_len if kv_len > prefix_len else None)
        assert match.checkpoint_slot == (end.slot if end else 0)
        assert match.kv_slots.tolist() == self.model.slots(namespace, seen[:prefix_len])
        if end:
            self.model.use(end)
        self.matches.append((match, end))

    @precondition(lambda self: self.matches)
    @rule(data=st.data(), ssm=st.booleans())
    def lock(self, data: st.DataObject, ssm: bool) -> None:
        match, end = data.draw(st.sampled_from(self.matches[-4:]))
        if end and (not end.alive or (ssm and end.slot != match.checkpoint_slot)):
            with pytest.raises(ValueError, match="evicted since"):
                self.cache.lock(match, ssm)
        else:
            self.model.held.append(Held(self.cache.lock(match, ssm), end, ssm))

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), keep_kv=st.booleans())
    def unlock(self, data: st.DataObject, keep_kv: bool) -> None:
        held = data.draw(st.sampled_from(self.model.held))
        if keep_kv:
            assert self.cache.relax(held.lease) is held.lease
            held.ssm = False
            return
        self.cache.unlock(held.lease)
        self.model.held.remove(held)
        with pytest.raises(ValueError, match="released already"):
            self.cache.unlock(held.lease)

    @rule(
        namespace=NAMESPACES,
        checkpoint=st.sampled_from([True, True, False]),
        lock=st.sampled_from([None, None, True, False]),
        data=st.data(),
    )
    def insert(self, namespace: str | None, checkpoint: bool, lock: bool | None, data: st.DataObject) -> None:
        tokens = self.prompt(data, namespace)
        end = len(tokens) - len(tokens) % self.page_size
        checkpoint = checkpoint and end > 0
        if checkpoint:
            tokens = tokens[:end]
        before_kv, before_ssm = len(self.kv), len(self.ssm)
        if not self.allocate(self.pages(len(tokens)), checkpoint):
            return
        own, slot = self.kv[before_kv:], sum(self.ssm[before_ssm:])
        reached = self.model.kv_len(namespace, tokens)
        start = data.draw(st.integers(0, reached // self.page_size)) * self.page_size
        # Up to `equal` the caller names the tree's slots, from there to `reached` its own duplicates.
        equal = data.draw(st.integers(start // self.page_size, reached // self.page_size)) * self.page_size
        tree = self.model.slots(namespace, tokens[:reached])
        given = [*tree[start:equal], *own[equal : len(tokens)]]
        buffer = TokenBuffer(tokens)
        inserted = self.cache.insert(
            buffer,
            np.array(given, np.int32),
            slot,
            namespace=namespace,
            stamp=buffer.stamp(len(tokens)) if checkpoint else None,
            kv_start=start,
        )
        node = self.model.insert(namespace, tokens[:end], own)
        assert (inserted.prefix_len, inserted.position) == (reached, end)
        assert inserted.freed_kv.tolist() == own[equal:reached]
        assert inserted.kv_slots.tolist() == [*tree[start:], *own[reached:end]]
        assert inserted.adopted == bool(checkpoint and node and not node.slot)
        self.kv = [*self.kv[:before_kv], *own[:equal], *own[end:]]
        if inserted.adopted and node:
            self.model.adopt(node, slot)
            self.ssm.remove(slot)
        if lock is not None:
            self.model.held.append(Held(self.cache.lock(inserted, lock), node, lock))

    @rule(kv=st.sampled_from([0, 0, 1, 1, 6]), ssm=st.sampled_from([0, 1, 1, 2]))
    def evict(self, kv: int, ssm: int) -> None:
        assert self.cache.evict(kv, ssm) == self.model.evict(kv, ssm)

    @rule(num_pages=st.integers(0, 3), num_ssm=st.integers(0, 2))
    def allocate_some(self, num_pages: int, num_ssm: int) -> None:
        self.allocate(num_pages * self.page_size, num_ssm)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.integers(0, len(self.kv) // self.page_size)) * self.page_size
        states = data.draw(st.integers(0, len(self.ssm)))
        self.cache.free_kv(self.kv[:pages])
        self.cache.free_ssm(self.ssm[:states])
        self.kv, self.ssm = self.kv[pages:], self.ssm[states:]

    @rule(rarely=st.integers(0, 7))
    def reset(self, rarely: int) -> None:
        if rarely:
            return
        if any(held.end for held in self.model.held):
            with pytest.raises(ValueError, match="before a reset"):
                self.cache.reset()
        else:
            self.cache.reset()
            self.model.clear()

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants(self.kv, self.ssm)
        found: dict[Path, list[int]] = {}
        ends: dict[Path, int] = {}
        for root in self.cache.to_dict()["roots"]:
            stack = [(child, []) for child in root["children"]]
            while stack:
                node, above = stack.pop()
                path = root["namespace"], tuple(above + node["tokens"])
                ends[path] = node["checkpoint_slot"]
                pages = [p for p in self.model.prefixes(*path) if len(p[1]) > len(above)]
                for index, page in enumerate(pages):
                    found[page] = node["kv_slots"][index * self.page_size : (index + 1) * self.page_size]
                stack.extend((child, list(path[1])) for child in node["children"])
        assert found == self.model.kv
        assert ends == {path: end.slot for path, end in self.model.ends.items()}
        assert self.cache.evictable_kv() == self.model.evictable_kv()
        assert self.cache.evictable_ssm() == self.model.evictable_ssm()


class PagedCacheMachine(CacheMachine):
    page_size = 4
    num_kv_slots = 64


RUNS = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)
TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = RUNS
TestPagedCacheMachine = PagedCacheMachine.TestCase
TestPagedCacheMachine.settings = RUNS
