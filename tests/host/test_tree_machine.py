"""Whatever is asked of the cache in whatever order, it equals a slow model of it, and eviction picks the very
same victims.

All operations, pages of 1, 4 and 64 tokens, two shards, several namespaces, a cap on checkpoints, our
allocators and a caller's that refuses at any call. A router that sees nothing but events knows the same
blocks and checkpoints. `MAMBACACHE_HOST_EXAMPLES=2000` makes the run that much longer, and another each time.
"""

import array
import os
from pathlib import Path as FilePath

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from mambacache_jax.errors import StampMismatch
from mambacache_jax.host import (
    EVERY,
    Inserted,
    Match,
    Namespace,
    Stamp,
    TokenBuffer,
    path_hash,
    token_bytes,
)
from mambacache_jax.host.namespace import AnyNamespace

from .plain_allocator import Refused
from .router import block_hash
from .slow_model import End, Held
from .watched_cache import WatchedCache

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


class CacheMachine(WatchedCache):
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


TestPages1 = run(CacheMachine, 30)
TestPages1OfACaller = run(BorrowedCacheMachine, 30)
TestPages4 = run(PagedCacheMachine, 30)
TestPages4OfACaller = run(PagedBorrowedCacheMachine, 20)
TestPages64 = run(WidePagedCacheMachine, 10)
