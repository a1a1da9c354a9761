"""Without prefix caching the same calls work, and nothing is found or kept."""

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.host import NullPrefixCache, PrefixCache, TokenBuffer, make_prefix_cache


def test_without_prefix_caching_nothing_is_found_kept_or_freed(page_size):
    cache = make_prefix_cache(CacheConfig(16, 4, page_size, prefix_caching=False, track_interval=256))
    assert isinstance(cache, NullPrefixCache)
    slots, slot = cache.allocate_kv(8), int(cache.allocate_ssm()[0])
    tokens = np.arange(8, dtype=np.int32)
    inserted = cache.insert(tokens, slots, slot, stamp=TokenBuffer(tokens).stamp(8))
    assert (inserted.prefix_len, inserted.freed_kv.tolist(), inserted.adopted) == (0, [], False)
    assert (inserted.kv_slots.tolist(), inserted.position) == (slots.tolist(), 0)
    match = cache.match(tokens)
    assert (match.prefix_len, match.kv_len, match.checkpoint_slot, len(match.kv_slots)) == (0, 0, 0, 0)
    cache.unlock(cache.relax(cache.lock(match)))
    assert cache.evict(kv=8, ssm=1) == (0, 0)
    cache.check_invariants(slots.tolist(), [slot])
    cache.free_kv(slots)
    cache.free_ssm([slot])
    cache.reset()
    cache.check_invariants()
    assert cache.stats().nodes == 0


def test_prefix_caching_is_honoured_by_the_factory_and_not_ignored_by_the_class():
    assert type(make_prefix_cache(CacheConfig(4, 1))) is PrefixCache
    with pytest.raises(ValueError, match="make_prefix_cache"):
        PrefixCache(CacheConfig(4, 1, prefix_caching=False))
