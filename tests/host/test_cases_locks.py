"""Faults in accounts, locks and evictions that other hybrid caches have had, by the numbers of `cases.md`.

Each slot remembers the tokens that were folded into it, so a match that names a wrong slot fails at once.
"""

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host import PrefixCache, make_prefix_cache

from .plain_allocator import PlainAllocator


def test_b04_b05_b06_a_hit_that_is_not_admitted_costs_no_slot(make_toy):
    toy = make_toy(num_kv_slots=16)
    toy.put("ABCDEFGH")
    toy.compute_kv("XXXX")
    for _ in range(3):
        lease = toy.cache.lock(toy.match("ABCDEFGHIJKLMNOP"))
        with pytest.raises(OutOfSlots):
            toy.cache.allocate_kv(8)
        toy.cache.unlock(lease)
        assert (toy.cache.kv[0].num_used, toy.cache.ssm[0].num_used) == (12, 1)
    toy.check()


def test_b08_no_slot_that_is_none_enters_the_free_list(toy):
    slots = toy.cache.allocate_ssm(3)
    for wrong in ([-1], [0], [int(slots[0]), -1], [int(slots[0]), int(slots[0])]):
        with pytest.raises(ValueError, match="Slot"):
            toy.cache.free_ssm(wrong)
    toy.cache.free_ssm(slots)
    assert sorted(toy.cache.allocate_ssm(8).tolist()) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_b15_a_leaf_whose_kv_is_held_gives_its_state_and_keeps_its_kv(make_toy):
    toy = make_toy(num_ssm_slots=1)
    lease = toy.cache.lock(toy.put("ABCD"), ssm=False)
    assert toy.cache.allocate_ssm().tolist() == [1]
    assert toy.match("ABCD").kv_len == 4
    assert toy.cache.evict(kv=64) == (0, 0)
    toy.cache.unlock(lease)
    toy.request_ssm = {1}
    toy.check()


@pytest.mark.parametrize("first_ssm", [True, False])
def test_b16_a_lock_older_than_the_state_releases_nobody_elses(toy, first_ssm):
    first = toy.cache.lock(toy.put("ABCD", checkpoint=False), ssm=first_ssm)
    toy.insert("ABCD", [], toy.compute_state("ABCD"), start=4)
    second = toy.cache.lock(toy.match("ABCD"))
    toy.cache.unlock(first)
    toy.check()
    assert toy.cache.evict(kv=64, ssm=8) == (0, 0)
    assert toy.hit("ABCD") == 4
    toy.cache.unlock(second)
    assert toy.cache.evict(ssm=8) == (0, 1)
    toy.check()


def test_b16_a_lock_survives_the_loss_and_return_of_the_state_under_it(toy):
    held = toy.cache.lock(toy.put("ABCD"), ssm=False)
    toy.cache.evict(ssm=1)
    locked = toy.cache.lock(toy.put("ABCD", checkpoint=False))
    toy.insert("ABCD", [], toy.compute_state("ABCD"), start=4)
    toy.cache.unlock(held)
    toy.check()
    assert toy.cache.evict(kv=64, ssm=8) == (0, 0)
    toy.cache.unlock(locked)
    toy.check()


def test_b43_a_slot_that_was_given_away_cannot_be_given_or_freed_again(toy):
    slots, slot = toy.compute_kv("ABCD"), toy.compute_state("ABCD")
    toy.insert("ABCD", slots, slot)
    with pytest.raises(ValueError, match="belongs to the tree"):
        toy.cache.insert(toy.tokens("ABCDEF"), toy.compute_kv("EF"), slot, kv_start=4)
    with pytest.raises(ValueError, match="belongs to the tree"):
        toy.cache.insert(toy.tokens("WXYZ"), slots)
    with pytest.raises(ValueError, match="belongs to the tree"):
        toy.cache.free_ssm([slot])
    toy.check()


def test_b45_a_key_one_token_short_of_a_page_leaves_the_last_page_to_the_request(make_toy):
    toy = make_toy(page_size=4)
    slots = toy.compute_kv("ABCDEFGH")
    inserted = toy.insert("ABCDEFG", slots[:7])
    assert inserted.position == 4
    assert toy.request_kv == set(slots[4:].tolist())
    toy.free(slots[4:])
    toy.check()


def test_b50_each_pool_is_counted_by_its_own_size():
    cache = PrefixCache(CacheConfig(num_kv_slots=4, num_ssm_slots=9))
    assert len(cache.allocate_ssm(9)) == 9
    with pytest.raises(OutOfSlots, match="KV pool: 5 slots needed, 4 free and 0 evictable of 4"):
        cache.allocate_kv(5)
    with pytest.raises(OutOfSlots, match="SSM pool: 1 slots needed, 0 free and 0 evictable of 9"):
        cache.allocate_ssm()


def test_b53_chunks_that_nobody_keeps_still_make_progress():
    cache = make_prefix_cache(CacheConfig(num_kv_slots=8, num_ssm_slots=1, prefix_caching=False))
    table = np.zeros(0, np.int32)
    for end in (4, 8):
        table = np.concatenate([table, cache.allocate_kv(4)])
        inserted = cache.insert(np.arange(end), table)
        assert inserted.kv_slots.tolist() == table.tolist()
        assert cache.kv[0].num_used == end
    cache.free_kv(table)
    cache.check_invariants()


def test_b56_a_lease_taken_while_evicting_releases_exactly_itself(toy):
    toy.put("AB")
    toy.put("ABCD")
    running = toy.cache.lock(toy.match("ABCD"))
    temporary = toy.cache.lock(toy.match("AB"))
    toy.cache.evict(ssm=1)
    toy.cache.unlock(temporary)
    with pytest.raises(ValueError, match="released already"):
        toy.cache.unlock(temporary)
    assert (toy.cache.evictable_kv(), toy.cache.evictable_ssm()) == (0, 1)
    toy.cache.unlock(running)
    assert (toy.cache.evictable_kv(), toy.cache.evictable_ssm()) == (4, 2)
    toy.check()


def test_b57_without_a_slot_a_checkpoint_is_skipped_and_the_request_goes_on(make_toy):
    toy = make_toy(num_ssm_slots=4)
    working = [toy.compute_state("working") for _ in range(2)]
    leases = [toy.cache.lock(toy.put(prompt)) for prompt in ("AAAA", "BBBB")]
    assert (toy.cache.ssm[0].num_free, toy.cache.evictable_ssm()) == (0, 0)
    toy.serve("CCCC", checkpoints=[2, 3])
    assert toy.skipped == 2
    assert toy.match("CCCC").kv_len == 3
    for lease in leases:
        toy.cache.unlock(lease)
    assert toy.cache.allocate_ssm(2).tolist() != working
    toy.request_ssm |= set(range(1, 5))
    toy.check()


def test_b58_removing_a_leaf_stops_at_an_ancestor_that_is_in_use(toy):
    toy.put("AB", checkpoint=False)
    lease = toy.cache.lock(toy.put("AB", checkpoint=False), ssm=False)
    toy.put("ABCD")
    toy.put("ABXY")
    assert toy.cache.evict(kv=2) == (2, 1)
    toy.check()
    assert toy.cache.evict(kv=64) == (2, 1)
    assert toy.match("AB").kv_len == 2
    toy.put("ABCD")
    toy.cache.unlock(lease)
    assert toy.cache.evict(kv=64).kv == 4
    toy.check()


def test_b61_a_reset_waits_for_leases_and_leaves_no_stale_hit(toy):
    toy.put("ABCD")
    running = toy.cache.lock(toy.match("ABCD"))
    own = toy.compute_kv("EF")
    preempted = toy.match("ABCD")
    with pytest.raises(ValueError, match="before a reset"):
        toy.cache.reset()
    toy.cache.unlock(running)
    toy.cache.reset()
    with pytest.raises(ValueError, match="match again"):
        toy.cache.lock(preempted)
    assert [toy.hit("ABCD"), toy.match("ABCD").kv_len] == [0, 0]
    toy.check()
    toy.free(own)
    assert toy.serve("ABCDEF").prefix_len == 0
    assert toy.serve("ABCDEF").prefix_len == 5


def test_b04_b05_b06_neither_a_probe_nor_a_pin_nor_a_renewal_costs_a_slot(toy):
    inserted = toy.put("ABCDEFGH")
    lease = toy.cache.lock(inserted)
    for _ in range(3):
        toy.cache.probe(toy.tokens("ABCDEFGHIJ"))
        toy.cache.match_kv(toy.tokens("ABCDEF"))
        toy.cache.unpin(toy.cache.pin(inserted))
        toy.cache.renew(lease, toy.match("ABCDEFGHIJ"))
        assert (toy.cache.kv[0].num_used, toy.cache.ssm[0].num_used) == (8, 1)
    toy.cache.unlock(lease)
    toy.check()


def test_b15_of_several_held_leaves_each_gives_its_state_and_none_its_kv(make_toy):
    toy = make_toy(num_ssm_slots=3)
    kept = [toy.put(prompt) for prompt in ("AB", "ABCD", "XY")]
    toy.cache.pin(kept[1], ssm=False)
    lease = toy.cache.lock(kept[2])
    toy.cache.relax(lease)
    assert sorted(toy.cache.allocate_ssm(3).tolist()) == [1, 2, 3]
    assert [toy.match(prompt).kv_len for prompt in ("ABCD", "XY")] == [4, 2]
    assert toy.cache.evict(kv=64) == (0, 0)
    toy.request_ssm = {1, 2, 3}
    toy.check()


@pytest.mark.parametrize("how", ["pin", "renew"])
def test_b16_pins_and_renewed_leases_release_nobody_elses_lock_either(toy, how):
    tombstone = toy.put("ABCD", checkpoint=False)
    first = toy.cache.pin(tombstone) if how == "pin" else toy.cache.lock(tombstone)
    toy.insert("ABCD", [], toy.compute_state("ABCD"), start=4)
    second = toy.cache.lock(toy.match("ABCD"))
    if how == "pin":
        toy.cache.unpin(first)
    else:
        toy.cache.renew(first, toy.match("XYZ"))
    toy.check()
    assert toy.cache.evict(kv=64, ssm=8) == (0, 0)
    toy.cache.unlock(second)
    assert toy.cache.evict(kv=64, ssm=8) == (4, 1)
    toy.check()


def test_b16_a_lock_survives_the_split_of_its_node_and_a_state_above_it(toy):
    lease = toy.cache.lock(toy.put("ABCDEFGH", checkpoint=False))
    toy.put("ABCD")
    toy.insert("ABCDEFGH", [], toy.compute_state("ABCDEFGH"), start=8)
    toy.check()
    assert toy.cache.evict(kv=64, ssm=8) == (0, 1)
    assert toy.hit("ABCDEFGH") == 8
    toy.cache.unlock(lease)
    assert toy.cache.evict(kv=64) == (8, 1)
    toy.check()


def test_b43_pages_that_were_given_away_cannot_be_given_again_in_part_or_moved(make_toy):
    toy = make_toy(page_size=4)
    slots = toy.compute_kv("ABCDEFGH")
    toy.insert("ABCDEFGH", slots)
    own = toy.compute_kv("WXYZ")
    for wrong in ([*own, *slots[4:]], [*slots[:4], *own], slots):
        with pytest.raises(ValueError, match="belongs to the tree"):
            toy.cache.insert(toy.tokens("WXYZWXYZ"), wrong)
    with pytest.raises(ValueError, match="belongs to the tree"):
        toy.cache.insert(toy.tokens("ABCDEFGH"), [*slots[4:], *slots[:4]])
    toy.check()


def test_b50_each_pool_of_each_shard_is_counted_by_its_own_size():
    cache = PrefixCache(CacheConfig(num_kv_slots=4, num_ssm_slots=9, num_shards=2))
    assert len(cache.allocate_kv(4, shard=1)) == 4
    assert len(cache.allocate_ssm(9, shard=0)) == 9
    for shard, kv, ssm in ((0, 4, 0), (1, 0, 9)):
        with pytest.raises(OutOfSlots, match=f"5 slots needed, {kv} free"):
            cache.allocate_kv(5, shard=shard)
        with pytest.raises(OutOfSlots, match=f"10 slots needed, {ssm} free"):
            cache.allocate_ssm(10, shard=shard)
    stats = cache.stats()
    assert (stats.kv_total, stats.kv_used, stats.ssm_total, stats.ssm_used) == (8, 4, 18, 9)


def test_b55_a_budget_is_counted_once_whoever_uses_it(make_toy):
    toy = make_toy(num_kv_slots=16, num_ssm_slots=4)
    for name, prompt in (("a", "ABCD"), ("b", "ABCD"), (None, "ABEF"), (None, "ABCD")):
        toy.put(prompt, namespace=name)
    every, parts = toy.cache.stats(), [toy.cache.stats(name) for name in ("a", "b", None)]
    assert sum(part.kv_cached for part in parts) == every.kv_cached == every.kv_used == 14
    assert sum(part.ssm_cached for part in parts) == every.ssm_cached == every.ssm_used == 4
    # The whole of one pool may be used, however full the other is.
    assert len(toy.cache.allocate_kv(2)) == 2
    assert toy.cache.stats().ssm_cached == 4
    toy.cache.evict(ssm=4)
    assert toy.cache.stats().kv_cached == 14


def test_b56_a_renewal_that_fails_releases_nothing(toy):
    held = toy.cache.lock(toy.put("ABCD"))
    toy.put("WXYZ")
    stale = toy.match("WXYZ")
    toy.cache.evict(kv=1)
    with pytest.raises(ValueError, match="evicted since"):
        toy.cache.renew(held, stale)
    assert (toy.cache.evictable_kv(), toy.cache.evictable_ssm()) == (0, 0)
    toy.cache.unlock(held)
    with pytest.raises(ValueError, match="released already"):
        toy.cache.renew(held, toy.match("ABCD"))
    assert toy.cache.evictable_kv() == 4
    toy.check()


def test_b57_pins_that_hold_every_state_stop_no_request(make_toy):
    toy = make_toy(num_ssm_slots=2)
    for prompt in ("AAAA", "BBBB"):
        toy.cache.pin(toy.put(prompt), expires_at=1.0)
    toy.serve("CCCC", checkpoints=[2])
    toy.cache.count_skipped("no_slot", toy.skipped)
    assert (toy.cache.stats().skipped["no_slot"], toy.match("CCCC").kv_len) == (1, 2)
    with pytest.raises(OutOfSlots, match="SSM pool: 1 slots needed, 0 free and 0 evictable of 2"):
        toy.cache.allocate_ssm()
    toy.cache.expire(1.0)
    toy.serve("CCCC", checkpoints=[2])
    assert toy.hit("CCCC") == 2
    toy.check()


def test_b58_the_climb_stops_at_a_pin_and_at_the_root_of_a_namespace(toy):
    pin = toy.cache.pin(toy.put("AB", checkpoint=False), ssm=False)
    toy.put("ABCD", checkpoint=False)
    toy.put("AB", namespace="tenant")
    assert toy.cache.evict(kv=64) == (4, 1)
    toy.check()
    assert [toy.match("AB", name).kv_len for name in (None, "tenant")] == [2, 0]
    toy.put("ABXY")
    toy.put("AB", namespace="tenant")
    toy.cache.unpin(pin)
    assert toy.cache.evict(kv=64) == (6, 2)
    assert toy.cache.stats().nodes == 0
    toy.check()


def test_b61_a_reset_of_one_tenant_stops_nobody_elses_requests_and_leaves_none_of_its_own(toy):
    running = toy.cache.lock(toy.put("ABCD", namespace="runs"))
    toy.put("ABCD", namespace="gone")
    preempted = toy.match("ABCD", "gone")
    kv_only = toy.cache.match_kv(toy.tokens("ABC"), "gone")
    pinned = toy.cache.pin(preempted)
    toy.cache.reset("gone")
    for stale in (preempted, kv_only):
        for ssm in (True, False):
            with pytest.raises(ValueError, match="match again"):
                toy.cache.lock(stale, ssm)
    assert not toy.cache.unpin(pinned)
    # The same prefix computed again, in the very same slots, is another one.
    toy.put("ABCD", namespace="gone")
    with pytest.raises(ValueError, match="match again"):
        toy.cache.lock(preempted)
    assert toy.hit("ABCD", "runs") == 4
    toy.cache.unlock(running)
    toy.check()


def test_b66_a_hit_is_never_longer_than_kv_and_state_both_reach(toy):
    toy.put("AB")
    toy.put("ABCDEF")
    toy.put("ABCDEFGH", checkpoint=False)
    assert [toy.hit(p) for p in ("AB", "ABCDE", "ABCDEFGHI")] == [2, 2, 6]
    toy.cache.evict(ssm=1)
    assert [toy.hit(p) for p in ("ABCDEFGHI", "ABCDE")] == [6, 0]
    toy.cache.evict(kv=1)
    toy.cache.evict(kv=1)
    assert (toy.hit("ABCDEFGHI"), toy.match("ABCDEFGHI").kv_len) == (0, 2)
    toy.check()


def test_b67_a_request_that_has_its_own_state_matches_kv_alone(make_toy, page_size):
    toy = make_toy(page_size=page_size)
    toy.put("ABCD")
    toy.put("ABCDEFGHIJKL", checkpoint=False)
    before = toy.everything()
    match = toy.cache.match_kv(toy.tokens("ABCDEFGHXX"))
    assert (match.prefix_len, match.kv_len, match.checkpoint_slot, match.branch_position) == (8, 8, 0, None)
    assert [toy.kv[slot] for slot in match.kv_slots.tolist()] == ["ABCDEFGH"[: end + 1] for end in range(8)]
    assert toy.everything() == before
    lease = toy.cache.lock(match, ssm=False)
    assert toy.cache.evict(kv=64, ssm=8) == (0, 1)
    toy.cache.unlock(lease)
    assert toy.cache.evict(kv=64).kv == 12
    toy.check()


def test_b67_a_match_of_kv_alone_locks_no_state(toy):
    toy.put("ABCD")
    match = toy.cache.match_kv(toy.tokens("ABCD"))
    for call in (toy.cache.lock, toy.cache.pin):
        with pytest.raises(ValueError, match="A match of KV alone has no checkpoint to lock"):
            call(match)
    assert toy.cache.match_kv(toy.tokens("XYZ")).node is None
    assert toy.cache.match_kv(toy.tokens("ABCD"), max_len=3).prefix_len == 3
    toy.check()


def test_b54_a_load_that_is_refused_takes_no_slot_of_the_callers(toy, tmp_path):
    toy.put("ABCD")
    toy.cache.save(tmp_path / "tree")
    kv, ssm = PlainAllocator(4), PlainAllocator(1)
    for config in (CacheConfig(2, 1), CacheConfig(4, 1, page_size=2), CacheConfig(4, 1, num_shards=2)):
        with pytest.raises(ValueError, match=r"out of range|Pages of 1|1 shards were saved"):
            PrefixCache.load(tmp_path / "tree", config, [kv] * config.num_shards, [ssm] * config.num_shards)
    assert (kv.num_free, ssm.num_free) == (4, 1)
