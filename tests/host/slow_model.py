"""What a shard of the prefix cache should hold, kept as whole token lists and without a tree.

It knows which slots hold the last page of each prefix, where nodes end, who holds them, and when each was
used, stamping whole paths. Every answer is found by looking at everything.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from mambacache_jax.host import EVERY, Inserted, Lease, Match
from mambacache_jax.host.namespace import AnyNamespace, Every

Path = tuple[AnyNamespace, tuple[int, ...]]


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


@dataclasses.dataclass(eq=False)
class Held:
    """A lease, and what it must hold; `end` is None where nothing was found."""

    lease: Lease
    end: End | None
    ssm: bool
    pinned: bool = False
    expires_at: float | None = None


class Model:
    """One shard. Slots are given by the caller, who has them from the cache under test."""

    def __init__(self, page_size: int, path_cap: int | None) -> None:
        self.page_size, self.path_cap = page_size, path_cap
        self.kv: dict[Path, list[int]] = {}
        self.ends: dict[Path, End] = {}
        self.held: list[Held] = []
        self.clock = 0
        self.counts: dict[AnyNamespace, Counter[str]] = {}

    def count(self, namespace: AnyNamespace) -> Counter[str]:
        return self.counts.setdefault(namespace, Counter())

    def prefixes(self, namespace: AnyNamespace, tokens: Sequence[int]) -> Iterator[Path]:
        for length in range(self.page_size, len(tokens) + 1, self.page_size):
            yield namespace, tuple(tokens[:length])

    def slots(self, namespace: AnyNamespace, tokens: Sequence[int]) -> list[int]:
        """The KV slots of a prefix that is in the cache, by position."""
        return [slot for path in self.prefixes(namespace, tokens) for slot in self.kv[path]]

    def kv_len(self, namespace: AnyNamespace, tokens: Sequence[int]) -> int:
        return max((len(p[1]) for p in self.prefixes(namespace, tokens) if p in self.kv), default=0)

    def hit(self, namespace: AnyNamespace, tokens: Sequence[int]) -> End | None:
        ends = [self.ends[p] for p in self.prefixes(namespace, tokens) if p in self.ends]
        return max((end for end in ends if end.slot), key=lambda end: len(end.path[1]), default=None)

    def node_of(self, namespace: AnyNamespace, tokens: Sequence[int]) -> End | None:
        """The node in which a prefix that is in the cache ends."""
        if not tokens:
            return None
        whole = End((namespace, tuple(tokens)))
        return min((end for end in self.ends.values() if whole.covers(end)), key=lambda end: len(end.path[1]))

    def match(self, namespace: AnyNamespace, tokens: Sequence[int]) -> End | None:
        """A hit, counted and used."""
        end = self.hit(namespace, tokens)
        counts = self.count(namespace)
        counts["matches"] += 1
        counts["queried_tokens"] += len(tokens)
        counts["kv_matched_tokens"] += self.kv_len(namespace, tokens)
        if end:
            counts["hit_tokens"] += len(end.path[1])
            self.use(end)
        return end

    def use(self, end: End) -> None:
        self.clock += 1
        end.ssm_use = self.clock
        for other in self.ends.values():
            if other.covers(end):
                other.kv_use = self.clock

    def is_held(self, end: End) -> bool:
        return any(held.end is not None and end.covers(held.end) for held in self.held)

    def is_locked(self, end: End) -> bool:
        return any(held.end is end and held.ssm for held in self.held)

    def can_lock(self, where: Match | Inserted, end: End | None, ssm: bool) -> bool:
        if end is None:
            return True
        if not end.alive:
            return False
        return not (ssm and isinstance(where, Match)) or end.slot == where.checkpoint_slot

    def run(self, end: End) -> list[Path]:
        """The pages of a node's own run: those below no shallower end."""
        above = [len(e.path[1]) for e in self.ends.values() if e is not end and e.covers(end)]
        return [p for p in self.prefixes(*end.path) if len(p[1]) > max(above, default=0)]

    def run_len(self, end: End) -> int:
        return len(self.run(end)) * self.page_size

    def children(self, end: End) -> list[End]:
        below = [other for other in self.ends.values() if other is not end and end.covers(other)]
        return [e for e in below if not any(o.covers(e) for o in below if o is not e)]

    def evictable_kv(self) -> int:
        return sum(self.run_len(end) for end in self.ends.values() if not self.is_held(end))

    def evictable_ssm(self) -> int:
        return sum(1 for end in self.ends.values() if end.slot and not self.is_locked(end))

    def insert(
        self, namespace: AnyNamespace, tokens: Sequence[int], kv_slots: Sequence[int], slot: int, freed: int
    ) -> tuple[End | None, bool]:
        """`kv_slots` has a slot for every position; those that the cache has already stay as they are.

        Returns:
          Where the tokens end, and whether the checkpoint slot was adopted.
        """
        counts = self.count(namespace)
        counts["inserts"] += 1
        counts["duplicate_kv"] += freed
        if not tokens:
            return None, False
        reached = self.kv_len(namespace, tokens)
        for length in {reached, len(tokens)} - {0}:
            path = namespace, tuple(tokens[:length])
            if path in self.ends:
                continue
            end = self.ends[path] = End(path)
            end.kv_use = max(other.kv_use for other in self.ends.values() if end.covers(other))
        for path in self.prefixes(namespace, tokens):
            if (length := len(path[1])) > reached:
                self.kv[path] = list(kv_slots[length - self.page_size : length])
        end = self.ends[namespace, tuple(tokens)]
        if len(tokens) > reached:
            self.use(end)
        adopted = bool(slot and not end.slot)
        if adopted:
            self.clock += 1
            end.slot, end.ssm_use = slot, self.clock
            self._keep_path_cap(end)
        if slot:
            counts["adopted" if adopted else "occupied"] += 1
        return end, adopted

    def _keep_path_cap(self, newest: End) -> None:
        if self.path_cap is None:
            return
        path = [end for end in self.ends.values() if end.slot and end.covers(newest)]
        excess = len(path) - self.path_cap
        for end in sorted(path, key=lambda end: len(end.path[1])):
            if excess > 0 and end is not newest and len(self.children(end)) == 1 and not self.is_locked(end):
                end.slot = 0
                excess -= 1
                self.count(end.path[0])["path_cap"] += 1

    def evict(self, kv: int, ssm: int) -> tuple[int, int]:
        freed_kv = freed_ssm = 0
        while freed_kv < kv:
            leaves = [e for e in self.ends.values() if not self.is_held(e) and not self.children(e)]
            if not leaves:
                break
            victim = min(leaves, key=lambda end: end.kv_use)
            counts, size = self.count(victim.path[0]), self.run_len(victim)
            freed_kv += size
            counts["kv_evicted"] += size
            for path in self.run(victim):
                del self.kv[path]
            del self.ends[victim.path]
            victim.alive = False
            freed_ssm += bool(victim.slot)
            counts["ssm_lost_with_kv"] += bool(victim.slot)
        for end in sorted(self.ends.values(), key=lambda end: end.ssm_use):
            if freed_ssm < ssm and end.slot and not self.is_locked(end):
                end.slot = 0
                freed_ssm += 1
                self.count(end.path[0])["ssm_evicted"] += 1
        return freed_kv, freed_ssm

    def within(self, namespace: AnyNamespace | Every) -> list[End]:
        return [end for end in self.ends.values() if namespace is EVERY or end.path[0] == namespace]

    def leases_within(self, namespace: AnyNamespace | Every) -> list[Held]:
        ends = self.within(namespace)
        return [held for held in self.held if held.end in ends]

    def reset(self, namespace: AnyNamespace | Every) -> None:
        """Forgets a namespace; only pins may hold it, and they end."""
        for held in self.leases_within(namespace):
            assert held.pinned
            self.held.remove(held)
        for end in self.within(namespace):
            for path in self.prefixes(*end.path):
                self.kv.pop(path, None)
            del self.ends[end.path]
            end.alive = False

    def sizes(self, namespace: AnyNamespace | Every) -> dict[str, int]:
        """What `stats` must say of sizes."""
        ends, leases = self.within(namespace), self.leases_within(namespace)
        states = [end for end in ends if end.slot]
        return {
            "nodes": len(ends),
            "tombstones": len(ends) - len(states),
            "kv_cached": sum(map(self.run_len, ends)),
            "kv_protected": sum(self.run_len(end) for end in ends if self.is_held(end)),
            "ssm_cached": len(states),
            "ssm_protected": sum(map(self.is_locked, states)),
            "leases": len(leases),
            "pins": sum(held.pinned for held in leases),
        }
