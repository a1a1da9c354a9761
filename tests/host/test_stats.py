"""The statistics say what was hit, what was skipped and what is there, for all and for each namespace."""

import pytest

from mambacache_jax.host import EVERY, PrefixCache
from mambacache_jax.host.shard import MAX_NAMESPACES
from mambacache_jax.host.stats import Counts


def test_statistics_tell_hits_kv_without_a_state_and_sizes(toy):
    toy.put("ABCD")
    toy.put("ABCDEFGH", checkpoint=False)
    toy.match("ABCDEFXYZ")
    toy.match("XYZ")
    lease = toy.cache.lock(toy.match("ABCD"))
    stats = toy.cache.stats()
    assert (stats.matches, stats.queried_tokens, stats.hit_tokens, stats.kv_only_tokens) == (3, 16, 8, 2)
    assert (stats.inserts, stats.adopted, stats.duplicate_kv, stats.hit_rate) == (2, 1, 4, 0.5)
    assert (stats.nodes, stats.tombstones) == (2, 1)
    assert (stats.kv_total, stats.kv_used, stats.kv_cached, stats.kv_protected) == (64, 8, 8, 4)
    assert (stats.ssm_total, stats.ssm_used, stats.ssm_cached, stats.ssm_protected) == (8, 1, 1, 1)
    toy.cache.unlock(lease)
    assert PrefixCache(toy.cache.config).stats().hit_rate == 0.0


def test_each_namespace_has_its_own_counts_and_all_have_their_sum(toy):
    toy.put("ABCD", namespace="a")
    toy.put("AB", namespace="b", checkpoint=False)
    toy.hit("ABCDE", "a")
    toy.hit("AB", "b")
    toy.hit("XY")
    lease = toy.cache.lock(toy.match("ABCD", "a"))
    a, b, default, every = (toy.cache.stats(name) for name in ("a", "b", None, EVERY))
    assert (a.matches, a.queried_tokens, a.hit_tokens, a.kv_matched_tokens) == (2, 9, 8, 8)
    assert (b.matches, b.queried_tokens, b.hit_tokens, b.kv_only_tokens) == (1, 2, 0, 2)
    assert (default.matches, default.queried_tokens, default.nodes) == (1, 2, 0)
    assert (every.matches, every.queried_tokens, every.hit_tokens) == (4, 13, 8)
    assert [s.nodes for s in (a, b, every)] == [1, 1, 2]
    assert [s.tombstones for s in (a, b, every)] == [0, 1, 1]
    assert [(s.kv_cached, s.kv_protected) for s in (a, b, every)] == [(4, 4), (2, 0), (6, 4)]
    assert [(s.ssm_cached, s.ssm_protected) for s in (a, b, every)] == [(1, 1), (0, 0), (1, 1)]
    assert [s.leases for s in (a, b, every)] == [1, 0, 1]
    assert a.kv_used == every.kv_used == 6
    toy.cache.unlock(lease)
    toy.cache.evict(ssm=1)
    toy.cache.evict(kv=64)
    assert [toy.cache.stats(name).kv_evicted for name in ("a", "b", EVERY)] == [4, 2, 6]
    assert [toy.cache.stats(name).ssm_evicted for name in ("a", "b", EVERY)] == [1, 0, 1]
    assert toy.cache.stats("a").matches == 2
    assert toy.cache.stats("never seen").matches == 0


def test_a_reset_keeps_the_counts(toy):
    toy.put("AB", namespace="a")
    toy.hit("AB", "a")
    toy.cache.reset("a")
    toy.cache.reset()
    assert (toy.cache.stats("a").hit_tokens, toy.cache.stats("a").nodes) == (2, 0)


def test_skipped_checkpoints_are_told_by_reason(make_toy):
    toy = make_toy(max_checkpoints_per_path=1)
    toy.put("A")
    toy.put("A")
    toy.put("AB")
    toy.cache.count_skipped("no_slot", 2)
    toy.cache.count_skipped("limit", namespace="a")
    assert toy.cache.stats().skipped == {"occupied": 1, "no_slot": 2, "limit": 1, "path_cap": 1}
    assert toy.cache.stats("a").skipped == {"occupied": 0, "no_slot": 0, "limit": 1, "path_cap": 0}
    for reason in ("occupied", "path_cap", "matches"):
        with pytest.raises(ValueError, match="for 'no_slot' or 'limit'"):
            toy.cache.count_skipped(reason)


def test_evictions_are_told_by_kind(toy):
    toy.put("AB")
    toy.put("CD")
    toy.cache.evict(ssm=1)
    toy.cache.evict(kv=4)
    stats = toy.cache.stats()
    assert (stats.kv_evicted, stats.ssm_evicted, stats.ssm_lost_with_kv) == (4, 1, 1)


def test_a_probe_counts_nothing(toy):
    toy.put("ABCD")
    before = toy.everything()
    toy.cache.probe(toy.tokens("ABCD"))
    toy.cache.match_kv(toy.tokens("ABCD"))
    assert toy.everything() == before


def test_of_too_many_namespaces_those_without_nodes_are_counted_together(toy):
    """A server sees new salts for ever; the counts of each must not stay for ever."""
    for number in range(MAX_NAMESPACES):
        toy.hit("AB", number)
    toy.hit("AB", "late")
    toy.put("AB", namespace="later")
    toy.hit("AB", "later")
    assert (toy.cache.stats("late").matches, toy.cache.stats("later").hit_tokens) == (0, 2)
    assert toy.cache.stats().matches == MAX_NAMESPACES + 2
    toy.check()
    toy.cache.evict(kv=64)
    toy.put("AB", namespace="last")
    toy.cache.reset("last")
    shard = toy.cache._shards[0]
    assert len(shard.counts) == MAX_NAMESPACES
    assert (toy.cache.stats().matches, toy.cache.stats().kv_evicted) == (MAX_NAMESPACES + 2, 2)
    assert toy.cache.stats().inserts == 2
    toy.check()


def test_the_recount_sees_counts_that_are_kept_twice(toy):
    toy.put("AB")
    toy.cache._shards[0].counts[None] = Counts()
    with pytest.raises(AssertionError, match="the counts of None are kept twice"):
        toy.check()
