"""Shards share nothing: slots, prefixes and leases of one mean nothing in another."""

import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.host import PrefixCache, make_prefix_cache

TOKENS = [1, 2, 3, 4]


@pytest.fixture
def cache():
    return PrefixCache(CacheConfig(8, 2, num_shards=2))


def put(cache, tokens, shard):
    slots, (slot,) = cache.allocate_kv(len(tokens), shard=shard), cache.allocate_ssm(shard=shard)
    return cache.insert(tokens, slots, slot, shard=shard)


def test_a_prefix_of_one_shard_is_unknown_in_another(cache):
    put(cache, TOKENS, 1)
    for look in (cache.match, cache.probe, cache.match_kv):
        assert look(TOKENS, shard=0).kv_len == 0
        assert (look(TOKENS, shard=1).prefix_len, look(TOKENS, shard=1).shard) == (4, 1)


def test_slots_are_counted_from_the_start_in_each_shard(cache):
    assert [put(cache, TOKENS, shard).kv_slots.tolist() for shard in (1, 0)] == [[1, 2, 3, 4]] * 2
    assert [cache.kv[shard].num_used for shard in (0, 1)] == [4, 4]
    for shard in (0, 1):
        cache.check_invariants(shard=shard)


def test_an_eviction_in_one_shard_leaves_the_other_alone(cache):
    for shard in (0, 1):
        put(cache, TOKENS, shard)
    assert len(cache.allocate_kv(8, shard=0)) == 8
    assert (cache.evictable_kv(shard=0), cache.evictable_kv(shard=1)) == (0, 4)
    assert cache.evict(kv=8, ssm=8, shard=0) == (0, 0)
    assert cache.match(TOKENS, shard=1).prefix_len == 4
    cache.check_invariants(range(1, 9), shard=0)
    cache.check_invariants(shard=1)


def test_a_match_of_one_shard_cannot_be_locked_in_another(cache):
    for shard in (0, 1):
        put(cache, TOKENS, shard)
    match = cache.match(TOKENS, shard=1)
    with pytest.raises(ValueError, match="another cache's"):
        cache.lock(match._replace(shard=0))
    lease = cache.lock(match)
    own = cache.allocate_kv(1, shard=0)
    with pytest.raises(ValueError, match="holds nothing of shard 0 of this cache"):
        cache.insert([*TOKENS, 5], own, lease=lease, shard=0)
    cache.free_kv(own, shard=0)
    assert (cache.evictable_kv(shard=0), cache.evictable_kv(shard=1)) == (4, 0)
    lease.shard = 0
    for call in (cache.unlock, cache.relax, lambda lease: cache.renew(lease, match)):
        with pytest.raises(ValueError, match="another cache's"):
            call(lease)
    lease.shard = 1
    cache.unlock(lease)
    cache.check_invariants(shard=1)


def test_a_lease_of_another_cache_is_refused(cache):
    put(cache, TOKENS, 1)
    lease = cache.lock(cache.match(TOKENS, shard=1))
    other = PrefixCache(CacheConfig(8, 2, num_shards=2))
    put(other, TOKENS, 1)
    for call in (other.unlock, other.relax):
        with pytest.raises(ValueError, match="another cache's"):
            call(lease)
    small = PrefixCache(CacheConfig(8, 2))
    with pytest.raises(ValueError, match="There is no shard 1; there are 1, counted from 0"):
        small.unlock(lease)
    cache.check_invariants(shard=1)


def test_a_lease_can_move_from_one_shard_to_another(cache):
    """A request that is preempted on one rank may be resumed on another."""
    for shard in (0, 1):
        put(cache, TOKENS, shard)
    lease = cache.lock(cache.match(TOKENS, shard=0))
    cache.renew(lease, cache.match(TOKENS, shard=1))
    assert (cache.evictable_kv(shard=0), cache.evictable_kv(shard=1)) == (4, 0)
    cache.unlock(lease)
    for shard in (0, 1):
        cache.check_invariants(shard=shard)


def test_slots_of_another_shard_are_foreign(cache):
    theirs, state = cache.allocate_kv(4, shard=1), cache.allocate_ssm(shard=1)
    with pytest.raises(ValueError, match="Slot 1 is free"):
        cache.insert(TOKENS, theirs, shard=0)
    with pytest.raises(ValueError, match="Slot 1 is free"):
        cache.free_kv(theirs)
    with pytest.raises(ValueError, match="Slot 1 is free"):
        cache.free_ssm(state)
    cache.insert(TOKENS, theirs, int(state[0]), shard=1)
    cache.check_invariants(shard=1)


def test_a_reset_is_of_one_shard_or_of_all(cache):
    for shard in (0, 1):
        put(cache, TOKENS, shard)
    cache.reset(shard=0)
    assert [cache.stats(shard=shard).nodes for shard in (0, 1)] == [0, 1]
    put(cache, TOKENS, 0)
    pin = cache.pin(cache.match(TOKENS, shard=1))
    cache.reset(shard=0)
    assert cache.stats().pins == 1
    lease = cache.lock(cache.match(TOKENS, shard=1))
    with pytest.raises(ValueError, match="1 leases hold"):
        cache.reset()
    cache.reset(shard=0)
    cache.unlock(lease)
    cache.reset()
    assert cache.stats().nodes == 0
    assert not cache.unpin(pin)


def test_statistics_are_of_one_shard_or_of_all(cache):
    for shard in (0, 1):
        put(cache, TOKENS, shard)
    cache.match(TOKENS, shard=1)
    assert [cache.stats(shard=shard).matches for shard in (0, 1, None)] == [0, 1, 1]
    assert [cache.stats(shard=shard).kv_cached for shard in (0, 1, None)] == [4, 4, 8]
    assert [cache.stats(shard=shard).kv_total for shard in (0, 1, None)] == [8, 8, 16]
    assert [cache.stats(shard=shard).ssm_used for shard in (0, 1, None)] == [1, 1, 2]
    assert cache.stats(None, shard=1).hit_tokens == cache.stats().hit_tokens == 4


@pytest.mark.parametrize("shard", [2, -1, "0", 0.5])
def test_a_shard_that_there_is_not_is_refused_by_every_call(cache, shard):
    put(cache, TOKENS, 0)
    before = cache.to_dict(), cache.stats()
    for call in (
        lambda: cache.match(TOKENS, shard=shard),
        lambda: cache.probe(TOKENS, shard=shard),
        lambda: cache.match_kv(TOKENS, shard=shard),
        lambda: cache.insert([], [], shard=shard),
        lambda: cache.allocate_kv(1, shard=shard),
        lambda: cache.allocate_ssm(1, shard=shard),
        lambda: cache.free_kv([], shard=shard),
        lambda: cache.free_ssm([], shard=shard),
        lambda: cache.evictable_kv(shard=shard),
        lambda: cache.evictable_ssm(shard=shard),
        lambda: cache.evict(shard=shard),
        lambda: cache.reset(shard=shard),
        lambda: cache.events(shard=shard),
        lambda: cache.count_skipped("limit", shard=shard),
        lambda: cache.stats(shard=shard),
        lambda: cache.render(shard=shard),
        lambda: cache.to_dict(shard=shard),
        lambda: cache.check_invariants(shard=shard),
    ):
        with pytest.raises(ValueError, match="There is no shard"):
            call()
    assert (cache.to_dict(), cache.stats()) == before


def test_without_prefix_caching_there_are_shards_too():
    cache = make_prefix_cache(CacheConfig(8, 2, num_shards=2, prefix_caching=False))
    slots = cache.allocate_kv(4, shard=1)
    assert cache.insert(TOKENS, slots, shard=1).kv_slots.tolist() == slots.tolist()
    assert cache.match(TOKENS, shard=1).shard == 1
    with pytest.raises(ValueError, match="There is no shard 2"):
        cache.match(TOKENS, shard=2)
