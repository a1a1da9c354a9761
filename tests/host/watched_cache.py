"""A prefix cache beside a slow model of it; all that can be seen of the two is compared after every step."""

import tempfile
from pathlib import Path as FilePath

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host import EVERY, PrefixCache
from mambacache_jax.host.namespace import AnyNamespace

from .plain_allocator import PlainAllocator, Refused
from .router import Router
from .slow_model import End, Held, Model, Path


class WatchedCache(RuleBasedStateMachine):
    """The cache, its model and the slots of requests, by shard; a subclass does something with them."""

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

    def lease_on(
        self, data: st.DataObject, shard: int, namespace: AnyNamespace, tokens: list[int]
    ) -> Held | None:
        """A lease on a prefix of these tokens, or on nothing; or none."""
        whole = End((namespace, tuple(tokens)))
        able = [held for held in self.models[shard].held if held.end is None or held.end.covers(whole)]
        return data.draw(st.sampled_from([None, *able]), label="lease")

    def refuse(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from([0, 0, 0, 1]))
        kv = data.draw(st.booleans())
        call = data.draw(st.integers(0, 2))
        (self.callers_kv if kv else self.callers_ssm)[shard].refuse_at = call

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
