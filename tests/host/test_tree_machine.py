"""Whatever is asked of the cache in whatever order, it equals a slow model of it, and eviction picks the very
same victims.

All operations, pages of 1, 4 and 64 tokens, two shards, several namespaces, a cap on checkpoints, our
allocators and a caller's that refuses at any call. A router that sees nothing but events knows the same
blocks and checkpoints. `MAMBACACHE_HOST_EXAMPLES=2000` makes the run that much longer, and another each time.
"""

import array
import os
import tempfile
from pathlib import Path as FilePath

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots, StampMismatch
from mambacache_jax.host import (
    EVERY,
    Inserted,
    Match,
    Namespace,
    PrefixCache,
    Stamp,
    TokenBuffer,
    path_hash,
    token_bytes,
)
from mambacache_jax.host.namespace import AnyNamespace

from .plain_allocator import PlainAllocator, Refused
from .router import Router, block_hash
from .slow_model import End, Held, Model, Path

SHARDS = st.sampled_from([0, 0, 0, 1])
NAMESPACES = st.sampled_from([None, None, "tenant", Namespace("tenant", salt="x")])
LETTERS = st.lists(st.integers(0, 1), max_size=4)
FORMS = st.sampled_from(
    [
        TokenBuffer,
        TokenBuffer,
        list,
        lambda tokens: bytes(token_bytes(tokens)),
        lambda tokens: bytearray(token_bytes(tokens)),
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: memoryview(array.array("i", tokens)),
    ]
)
# By how often they are called.
STEPS = {
    "insert": 8,
    "look_up": 8,
    "lock": 5,
    "release": 3,
    "free": 4,
    "evict": 2,
    "allocate_some": 1,
    "insert_wrongly": 3,
    "fetch_events": 2,
    "expire": 2,
    "skip_checkpoints": 1,
    "reset": 1,
    "save_and_load": 1,
}

Found = tuple[Match | Inserted, End | None]


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    num_kv_slots = 30
    # Each letter is a run of tokens, so that prompts share prefixes that end inside a page and at its end.
    letter_tokens = 2
    borrowed = False

    @initialize(
        path_cap=st.sampled_from([None, None, 1, 2]),
        events=st.booleans(),
        log_limit=st.sampled_from([3, 65536]),
    )
    def start(self, path_cap: int | None, events: bool, log_limit: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.config = CacheConfig(
            self.num_kv_slots,
            5,
            self.page_size,
            track_interval=256,
            num_shards=2,
            max_checkpoints_per_path=path_cap,
            events=events,
        )
        self.log_limit = log_limit
        self.models = [Model(self.page_size, path_cap) for _ in range(2)]
        self.make_cache(None)

    def make_cache(self, path: FilePath | None) -> None:
        """A new cache, empty or from a file; requests have no slots and hold nothing."""
        self.callers_kv = [PlainAllocator(self.num_kv_slots, self.page_size) for _ in range(2)]
        self.callers_ssm = [PlainAllocator(5) for _ in range(2)]
        callers = (self.callers_kv, self.callers_ssm) if self.borrowed else (None, None)
        if path is None:
            self.cache = PrefixCache(self.config, *callers)
        else:
            for model, kv, ssm in zip(self.models, self.callers_kv, self.callers_ssm, strict=True):
                kv.take(np.array([slot for run in model.kv.values() for slot in run], np.int32))
                ssm.take(np.array([end.slot for end in model.ends.values() if end.slot], np.int32))
            self.cache = PrefixCache.load(path, kv=callers[0], ssm=callers[1])
        self.routers = [Router(self.page_size) for _ in range(2)]
        self.kv: list[list[int]] = [[], []]
        self.ssm: list[list[int]] = [[], []]
        self.found: list[Found] = []
        self.ended_pins: list[Held] = []
        self.now = 0.0
        if self.config.events:
            for shard in self.cache._shards.values():
                assert shard.log is not None
                shard.log._limit = self.log_limit

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for caller in (*self.callers_kv, *self.callers_ssm):
            caller.refuse_at = None
        for shard, model in enumerate(self.models):
            for held in model.held:
                if held.pinned:
                    assert self.cache.unpin(held.lease)
                else:
                    self.cache.unlock(held.lease)
            self.cache.evict(kv=self.num_kv_slots, shard=shard)
            self.cache.free_kv(self.kv[shard], shard=shard)
            self.cache.free_ssm(self.ssm[shard], shard=shard)
            self.cache.check_invariants(shard=shard)
            assert (self.cache.kv[shard].num_used, self.cache.ssm[shard].num_used) == (0, 0)
            if self.borrowed:
                assert self.callers_kv[shard].num_free == self.num_kv_slots
                assert self.callers_ssm[shard].num_free == 5
        self.folder.cleanup()

    def pages(self, length: int) -> int:
        return -(-length // self.page_size) * self.page_size

    def prompt(self, data: st.DataObject, shard: int) -> tuple[AnyNamespace, list[int]]:
        """Part of a prompt that the cache knows, or of none, and then tokens of its own."""
        known = list(self.models[shard].ends)
        strange = not known or data.draw(st.integers(0, 5), label="strange") == 5
        namespace, base = (None, ()) if not known else data.draw(st.sampled_from(known), label="base")
        if strange:
            namespace = data.draw(NAMESPACES)
        cut = data.draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 8]), label="cut") * self.letter_tokens // 2
        more = [letter for letter in data.draw(LETTERS, label="more") for _ in range(self.letter_tokens)]
        tokens = [*base[: max(0, len(base) - cut)], *more][: 8 * self.letter_tokens]
        return namespace, tokens

    def lease_on(
        self, data: st.DataObject, shard: int, namespace: AnyNamespace, tokens: list[int]
    ) -> Held | None:
        """A lease on a prefix of these tokens, or on nothing; or none."""
        whole = End((namespace, tuple(tokens)))
        able = [held for held in self.models[shard].held if held.end is None or held.end.covers(whole)]
        return data.draw(st.sampled_from([None, *able]), label="lease")

    def was_refused(self) -> bool:
        """Whether a caller's allocator has refused a call since this was asked."""
        callers = [c for c in (*self.callers_kv, *self.callers_ssm) if c.refused]
        for caller in callers:
            caller.refused = False
        return bool(callers)

    def allocate(self, shard: int, num_kv: int, num_ssm: int) -> bool:
        """Takes slots, which the model must find possible exactly when the cache does."""
        cache, model = self.cache, self.models[shard]
        missing = num_kv - cache.kv[shard].num_free
        if missing > model.evictable_kv():
            with pytest.raises(OutOfSlots, match=f"KV pool: {num_kv} slots needed"):
                cache.allocate_kv(num_kv, shard=shard)
            return False
        model.evict(kv=missing, ssm=0)
        try:
            self.kv[shard].extend(cache.allocate_kv(num_kv, shard=shard).tolist())
        except (OutOfSlots, Refused):
            assert self.was_refused()
            return False
        missing = num_ssm - cache.ssm[shard].num_free
        if missing > model.evictable_ssm():
            with pytest.raises(OutOfSlots, match=f"SSM pool: {num_ssm} slots needed"):
                cache.allocate_ssm(num_ssm, shard=shard)
            return False
        model.evict(kv=0, ssm=missing)
        try:
            self.ssm[shard].extend(cache.allocate_ssm(num_ssm, shard=shard).tolist())
        except (OutOfSlots, Refused):
            assert self.was_refused()
            return False
        return True

    @rule(name=st.sampled_from([name for name, often in STEPS.items() for _ in range(often)]), data=st.data())
    def step(self, name: str, data: st.DataObject) -> None:
        if self.borrowed and data.draw(st.integers(0, 3), label="refuse") == 3:
            self.refuse(data)
        getattr(self, name)(data)

    def look_up(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        cut = data.draw(st.sampled_from([None, None, 0, 1, 3]))
        how = data.draw(st.sampled_from(["match", "match", "probe", "match_kv"]))
        form = data.draw(FORMS)
        namespace, tokens = self.prompt(data, shard)
        model = self.models[shard]
        max_len = None if cut is None else max(0, len(tokens) - cut)
        seen = tokens[:max_len]
        kv_len = model.kv_len(namespace, seen)
        match = getattr(self.cache, how)(form(tokens), namespace, max_len, shard=shard)
        if how == "match_kv":
            end, prefix_len, slot = model.node_of(namespace, seen[:kv_len]), kv_len, 0
        else:
            end = model.match(namespace, seen) if how == "match" else model.hit(namespace, seen)
            prefix_len, slot = (len(end.path[1]), end.slot) if end else (0, 0)
        assert (match.prefix_len, match.kv_len, match.shard) == (prefix_len, kv_len, shard)
        assert match.branch_position == (kv_len if kv_len > prefix_len else None)
        assert match.checkpoint_slot == slot
        assert match.kv_slots.tolist() == model.slots(namespace, seen[:prefix_len])
        self.found.append((match, end))

    def lock(self, data: st.DataObject) -> None:
        if not self.found:
            return
        ssm = data.draw(st.booleans())
        how = data.draw(st.sampled_from(["lock", "lock", "pin", "renew", "abroad"]))
        where, end = data.draw(st.sampled_from(self.found[-4:]))
        model = self.models[where.shard]
        leases = [held for held in model.held if not held.pinned]
        if how == "abroad":
            if end:
                with pytest.raises(ValueError, match="another cache's"):
                    self.cache.lock(where._replace(shard=1 - where.shard), ssm)
            return
        if how == "renew":
            if not leases:
                return
            held = data.draw(st.sampled_from(leases))
            if model.can_lock(where, end, ssm):
                assert self.cache.renew(held.lease, where, ssm) is held.lease
                held.end, held.ssm = end, ssm
            else:
                with pytest.raises(ValueError, match=r"evicted since|KV alone"):
                    self.cache.renew(held.lease, where, ssm)
            return
        expires_at = data.draw(st.sampled_from([None, 1.0, 3.0]).map(lambda t: t and self.now + t))
        if how == "pin" and end is None:
            with pytest.raises(ValueError, match="nothing to pin"):
                self.cache.pin(where, expires_at, ssm)
        elif not model.can_lock(where, end, ssm):
            with pytest.raises(ValueError, match=r"evicted since|KV alone"):
                self.cache.pin(where, expires_at, ssm) if how == "pin" else self.cache.lock(where, ssm)
        elif how == "pin":
            lease = self.cache.pin(where, expires_at, ssm)
            model.held.append(Held(lease, end, ssm, pinned=True, expires_at=expires_at))
        else:
            model.held.append(Held(self.cache.lock(where, ssm), end, ssm))

    def release(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        keep_kv = data.draw(st.booleans())
        model = self.models[shard]
        if not model.held:
            return
        held = data.draw(st.sampled_from(model.held))
        if held.pinned:
            with pytest.raises(ValueError, match="is a pin"):
                self.cache.unlock(held.lease)
            assert self.cache.unpin(held.lease)
            model.held.remove(held)
            self.ended_pins.append(held)
        elif keep_kv:
            assert self.cache.relax(held.lease) is held.lease
            held.ssm = False
        else:
            self.cache.unlock(held.lease)
            model.held.remove(held)
            for again in (self.cache.unlock, self.cache.relax):
                with pytest.raises(ValueError, match="released already"):
                    again(held.lease)
        assert not any(self.cache.unpin(ended.lease) for ended in self.ended_pins)

    def expire(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
        self.now += step
        ended = 0
        for model in self.models:
            due = [h for h in model.held if h.expires_at is not None and h.expires_at <= self.now]
            for held in due:
                model.held.remove(held)
            self.ended_pins += due
            ended += len(due)
        assert self.cache.expire(self.now) == ended

    def insert(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        checkpoint = data.draw(st.sampled_from([True, True, False]))
        stamped = data.draw(st.sampled_from(["no", "hashed", "other buffer", "buffer"]))
        extra = data.draw(st.sampled_from([0, 0, 3]))
        form = data.draw(FORMS)
        namespace, tokens = self.prompt(data, shard)
        model = self.models[shard]
        end = len(tokens) - len(tokens) % self.page_size
        checkpoint = checkpoint and end > 0
        if checkpoint:
            tokens = tokens[:end]
        before_kv, before_ssm = len(self.kv[shard]), len(self.ssm[shard])
        if not self.allocate(shard, self.pages(len(tokens)), checkpoint):
            return
        own, slot = self.kv[shard][before_kv:], sum(self.ssm[shard][before_ssm:])
        reached = model.kv_len(namespace, tokens)
        start = data.draw(st.integers(0, reached // self.page_size)) * self.page_size
        lease, said = self.lease_on(data, shard, namespace, tokens[:reached]), True
        if lease and lease.end:
            start, said = len(lease.end.path[1]), data.draw(st.booleans())
        # Up to `equal` the caller names the tree's slots, from there to `reached` its own duplicates.
        equal = data.draw(st.integers(start // self.page_size, reached // self.page_size)) * self.page_size
        tree = model.slots(namespace, tokens[:reached])
        given = [*tree[start:equal], *own[equal : len(tokens)]]
        buffer = TokenBuffer(tokens)
        stamp = None
        if checkpoint and stamped != "no":
            stamp = buffer.stamp(len(tokens))
            if stamped == "hashed":
                stamp = Stamp(len(tokens), path_hash(token_bytes(tokens)))
        buffer.extend([7] * extra)
        whole = buffer if stamped == "buffer" else form([*tokens, *[7] * extra])
        inserted = self.cache.insert(
            whole,
            np.array(given, np.int32),
            slot,
            namespace=namespace,
            stamp=stamp,
            kv_start=start if said else None,
            length=len(tokens) if extra else None,
            lease=lease and lease.lease,
            shard=shard,
        )
        node, adopted = model.insert(namespace, tokens[:end], own, slot, reached - equal)
        assert (inserted.prefix_len, inserted.position) == (reached, end)
        assert inserted.freed_kv.tolist() == own[equal:reached]
        assert inserted.kv_slots.tolist() == [*tree[start:], *own[reached:end]]
        assert inserted.adopted == adopted
        self.kv[shard] = [*self.kv[shard][:before_kv], *own[:equal], *own[end:]]
        if adopted:
            self.ssm[shard].remove(slot)
        self.found.append((inserted, node))

    def insert_wrongly(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        wrong = data.draw(
            st.sampled_from(
                ["stamp", "twice", "null", "out of range", "tree's", "free", "too few", "start", "length"]
            )
        )
        """The invariants see that nothing was changed."""
        _, tokens = self.prompt(data, shard)
        tokens = tokens[: len(tokens) - len(tokens) % self.page_size]
        before_kv, before_ssm = len(self.kv[shard]), len(self.ssm[shard])
        if not tokens or not self.allocate(shard, len(tokens), 1):
            return
        given = np.array(self.kv[shard][before_kv:], np.int32)
        slot = self.ssm[shard][before_ssm]
        kwargs = {}
        error = ValueError
        page = data.draw(st.integers(0, len(tokens) // self.page_size - 1)) * self.page_size
        there = slice(page, page + self.page_size)
        run = np.arange(self.page_size, dtype=np.int32)
        model = self.models[shard]
        if wrong == "stamp":
            kwargs["stamp"] = Stamp(len(tokens), path_hash(token_bytes(tokens)) ^ 1)
            error = StampMismatch
        elif wrong == "null":
            given[there] = run
        elif wrong == "out of range":
            given[there] = self.num_kv_slots + self.page_size + run
        elif wrong == "too few":
            given = given[1:]
        elif wrong == "start":
            kwargs["kv_start"] = len(tokens) + self.page_size
        elif wrong == "length":
            kwargs["length"] = len(tokens) + 1
        elif wrong == "twice":
            if len(tokens) == self.page_size:
                return
            given[there] = given[page - self.page_size :][: self.page_size]
        elif wrong == "free":
            free = set(range(self.page_size, self.num_kv_slots + self.page_size))
            free -= {s for slots in model.kv.values() for s in slots} | set(self.kv[shard])
            if not free or self.borrowed:
                return
            given[there] = min(free) + run
        else:
            others = [
                slots for path, slots in model.kv.items() if path != (None, tuple(tokens[: there.stop]))
            ]
            if not others:
                return
            given[there] = data.draw(st.sampled_from(others))
        with pytest.raises(error):
            self.cache.insert(tokens, given, slot, shard=shard, **kwargs)

    def evict(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        kv = data.draw(st.sampled_from([0, 0, 1, 1, 6]))
        ssm = data.draw(st.sampled_from([0, 1, 1, 2]))
        assert self.cache.evict(kv, ssm, shard=shard) == self.models[shard].evict(kv, ssm)

    def allocate_some(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        num_pages = data.draw(st.integers(0, 3))
        num_ssm = data.draw(st.integers(0, 2))
        self.allocate(shard, num_pages * self.page_size, num_ssm)

    def free(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        kv, ssm = self.kv[shard], self.ssm[shard]
        pages = data.draw(st.integers(0, len(kv) // self.page_size)) * self.page_size
        states = data.draw(st.integers(0, len(ssm)))
        try:
            self.cache.free_kv(kv[:pages], shard=shard)
            del kv[:pages]
            self.cache.free_ssm(ssm[:states], shard=shard)
            del ssm[:states]
        except Refused:
            assert self.was_refused()

    def reset(self, data: st.DataObject) -> None:
        namespace = data.draw(st.one_of(st.just(EVERY), NAMESPACES))
        shard = data.draw(st.sampled_from([0, 1, None]))
        models = self.models if shard is None else [self.models[shard]]
        leases = [held for model in models for held in model.leases_within(namespace)]
        if not all(held.pinned for held in leases):
            with pytest.raises(ValueError, match="before a reset"):
                self.cache.reset(namespace, shard=shard)
            return
        self.cache.reset(namespace, shard=shard)
        self.ended_pins += leases
        for model in models:
            model.reset(namespace)

    def skip_checkpoints(self, data: st.DataObject) -> None:
        namespace = data.draw(NAMESPACES)
        shard = data.draw(SHARDS)
        reason = data.draw(st.sampled_from(["no_slot", "limit"]))
        self.cache.count_skipped(reason, 2, namespace=namespace, shard=shard)
        self.models[shard].count(namespace)[reason] += 2

    def save_and_load(self, data: st.DataObject) -> None:
        path = FilePath(self.folder.name) / "tree.npz"
        self.cache.save(path)
        for model in self.models:
            model.held, model.counts = [], {}
        self.make_cache(path)

    def refuse(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        kv = data.draw(st.booleans())
        call = data.draw(st.integers(0, 2))
        (self.callers_kv if kv else self.callers_ssm)[shard].refuse_at = call

    def fetch_events(self, data: st.DataObject) -> None:
        shard = data.draw(SHARDS)
        if not self.config.events:
            with pytest.raises(ValueError, match="Events are off"):
                self.cache.events(shard=shard)
            return
        router, model = self.routers[shard], self.models[shard]
        router.replay(self.cache.events(shard=shard))
        assert router.blocks == {block_hash(*path, self.page_size): path[1] for path in model.kv}
        states = [end.path for end in model.ends.values() if end.slot]
        assert router.checkpoints == {block_hash(*path, self.page_size): len(path[1]) for path in states}

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        for shard, model in enumerate(self.models):
            self.cache.check_invariants(self.kv[shard], self.ssm[shard], shard=shard)
            self.check_tree(shard, model)
            self.check_numbers(shard, model)

    def check_tree(self, shard: int, model: Model) -> None:
        found: dict[Path, list[int]] = {}
        ends: dict[Path, int] = {}
        names = {repr(n): n for n in model.counts} | {repr(path[0]): path[0] for path in model.ends}
        for root in self.cache.to_dict(shard=shard)["roots"]:
            namespace = names.get(root["namespace"], root["namespace"])
            stack = [(child, ()) for child in root["children"]]
            while stack:
                node, above = stack.pop()
                path = namespace, (*above, *node["tokens"])
                ends[path] = node["checkpoint_slot"]
                pages = [p for p in model.prefixes(*path) if len(p[1]) > len(above)]
                for index, page in enumerate(pages):
                    found[page] = node["kv_slots"][index * self.page_size : (index + 1) * self.page_size]
                stack.extend((child, path[1]) for child in node["children"])
        assert found == model.kv
        assert ends == {path: end.slot for path, end in model.ends.items()}

    def check_numbers(self, shard: int, model: Model) -> None:
        cache = self.cache
        assert cache.evictable_kv(shard=shard) == model.evictable_kv()
        assert cache.evictable_ssm(shard=shard) == model.evictable_ssm()
        kv_used = sum(map(len, model.kv.values())) + len(self.kv[shard])
        ssm_used = sum(1 for end in model.ends.values() if end.slot) + len(self.ssm[shard])
        assert (cache.kv[shard].num_used, cache.ssm[shard].num_used) == (kv_used, ssm_used)
        namespaces = {EVERY, *model.counts}
        for namespace in namespaces:
            stats = cache.stats(namespace, shard=shard)
            expected = (
                sum(model.counts.values(), start=type(model.count(None))())
                if namespace is EVERY
                else model.counts[namespace]
            )
            counted = {**vars(stats), **stats.skipped}
            for name in (
                *("matches", "queried_tokens", "hit_tokens", "kv_matched_tokens", "inserts", "duplicate_kv"),
                *("adopted", "occupied", "no_slot", "limit", "path_cap"),
                *("kv_evicted", "ssm_evicted", "ssm_lost_with_kv"),
            ):
                assert counted[name] == expected[name], name
            for name, size in model.sizes(namespace).items():
                assert counted[name] == size, name
            assert (stats.kv_used, stats.ssm_used) == (kv_used, ssm_used)


class BorrowedCacheMachine(CacheMachine):
    borrowed = True


class PagedCacheMachine(CacheMachine):
    page_size = 4
    num_kv_slots = 48


class PagedBorrowedCacheMachine(PagedCacheMachine):
    borrowed = True


class WidePagedCacheMachine(CacheMachine):
    page_size = 64
    num_kv_slots = 768
    letter_tokens = 32


def run(machine: type[CacheMachine], max_examples: int) -> type:
    """The machine as a test: some 40 steps an example."""
    factor = int(os.environ.get("MAMBACACHE_HOST_EXAMPLES", "0"))
    machine.TestCase.settings = settings(
        max_examples=factor or max_examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=not factor,
    )
    return machine.TestCase


TestPages1 = run(CacheMachine, 60)
TestPages1OfACaller = run(BorrowedCacheMachine, 60)
TestPages4 = run(PagedCacheMachine, 60)
TestPages4OfACaller = run(PagedBorrowedCacheMachine, 40)
TestPages64 = run(WidePagedCacheMachine, 20)
