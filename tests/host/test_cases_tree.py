"""Faults that other hybrid caches have had, by the numbers of `cases.md`, as far as the tree can have them.

Each slot remembers the tokens that were folded into it, so a match that names a wrong slot fails at once.
"""

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots, StampMismatch
from mambacache_jax.host import PrefixCache, TokenBuffer, make_prefix_cache


def test_b01_the_same_prompt_hits_the_third_time_though_only_its_end_had_a_state(make_toy, page_size):
    toy = make_toy(page_size=page_size)
    last = toy.floor(7)
    toy.put("ABCDEFGH")
    second = toy.serve("ABCDEFGH")
    assert (second.prefix_len, second.branch_position) == (0, last)
    assert toy.serve("ABCDEFGH").prefix_len == last
    assert toy.hit("ABCDEFGHX") == 8


def test_b01_the_same_prompt_hits_the_second_time_with_one_token_left(toy):
    assert toy.serve("ABCDEFGH").prefix_len == 0
    assert toy.serve("ABCDEFGH").prefix_len == 7


def test_b02_of_prompts_that_share_a_prefix_the_second_plants_what_the_third_hits(make_toy, page_size):
    toy = make_toy(page_size=page_size)
    hits = [toy.serve("PPPPPPPP" + suffix * 6) for suffix in "abcd"]
    assert [hit.prefix_len for hit in hits] == [0, 0, 8, 8]
    assert hits[1].branch_position == 8


@pytest.mark.parametrize("shared", [12, 15])
def test_b03_a_shared_part_that_ends_inside_a_page_is_reused_up_to_its_last_page(make_toy, shared):
    toy = make_toy(page_size=8, num_kv_slots=128)
    prompts = ["S" * shared + unique * (22 - shared) for unique in "abc"]
    toy.serve(prompts[0])
    assert toy.serve(prompts[1]).branch_position == 8
    stats = toy.cache.stats()
    assert (stats.kv_matched_tokens, stats.hit_tokens, stats.kv_only_tokens) == (8, 0, 8)
    assert toy.serve(prompts[2]).prefix_len == 8


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


def test_b10_a_state_that_lies_inside_a_page_is_refused(make_toy):
    toy = make_toy(page_size=16)
    prompt = "ABCDEFGHIJKLMNOPQRST"
    slots, slot = toy.compute_kv(prompt), toy.compute_state(prompt)
    buffer = TokenBuffer(toy.tokens(prompt))
    with pytest.raises(StampMismatch, match="multiple of page_size=16, not at 20"):
        toy.cache.insert(buffer, slots[:20], slot, stamp=buffer.stamp(20))
    with pytest.raises(StampMismatch, match="state of others"):
        toy.cache.insert(toy.tokens(prompt[:16]), slots[:16], slot, stamp=buffer.stamp(20))
    toy.check()
    assert toy.hit(prompt) == 0


def test_b12_lookups_shorter_than_a_page_leave_no_empty_node(make_toy):
    toy = make_toy(page_size=4)
    toy.put("ABCD")
    toy.put("ABCDEFGH")
    assert [toy.hit("ABCDEFG"), toy.hit("ABC"), toy.hit("")] == [4, 0, 0]
    assert toy.put("ABC", checkpoint=False).position == 0
    toy.check()
    assert toy.cache.evict(kv=64).kv == 8
    assert toy.cache.stats().nodes == 0


def test_b13_a_node_split_at_a_page_is_found_by_its_first_page(make_toy):
    toy = make_toy(page_size=4)
    toy.put("ABCDEFGHIJKL")
    toy.put("ABCDEFXXIJKL")
    toy.check()
    assert toy.match("ABCDEFXX").kv_len == 8
    assert [toy.hit("ABCDEFGHIJKL"), toy.hit("ABCDEFXXIJKL")] == [12, 12]
    assert toy.cache.evict(kv=64).kv == 20
    toy.check()


def test_b14_a_node_without_a_state_does_not_stop_the_walk(toy):
    toy.put("A" * 8, checkpoint=False)
    toy.put("A" * 16)
    assert toy.hit("A" * 20) == 16


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


def test_b17_a_page_that_the_pool_cannot_hold_is_refused_at_once():
    with pytest.raises(ValueError, match="num_kv_slots must be a positive multiple of page_size=16, got 12"):
        CacheConfig(num_kv_slots=12, num_ssm_slots=1, page_size=16)


def test_b20_the_state_of_the_whole_prompt_is_never_used_for_less_of_it(make_toy):
    toy = make_toy(page_size=4)
    prompt = "ABCDEFGHIJKL"
    toy.put(prompt)
    second = toy.serve(prompt)
    assert (second.prefix_len, second.checkpoint_slot, second.branch_position) == (0, 0, 8)
    assert toy.serve(prompt).prefix_len == 8


def test_b21_a_fork_one_page_before_the_end_is_resumed_at_the_fork(make_toy):
    toy = make_toy(page_size=4)
    assert [toy.serve("ABCDEFGH" + suffix * 4).prefix_len for suffix in "abc"] == [0, 8, 8]


def test_b24_every_state_lies_at_a_page_and_has_the_hash_of_its_path(make_toy):
    toy = make_toy(page_size=4)
    for prompt in ("ABCDEFGHIJ", "ABCDEFXXXX", "ABCDEFGHIJKLMN"):
        toy.serve(prompt)
        toy.check()
    assert toy.cache.stats().ssm_cached == 4
    ends = ("ABCDX", "ABCDEFGHX", "ABCDEFXXX", "ABCDEFGHIJKLX")
    assert [toy.hit(prompt) for prompt in ends] == [4, 8, 8, 12]


@pytest.mark.parametrize("written", ["", "ABCDEFG", "ABCDEFGHI", "XBCDEFGH"])
def test_b26_b29_b47_a_slot_written_for_other_tokens_is_never_adopted(toy, written):
    slots, slot = toy.compute_kv("ABCDEFGH"), toy.compute_state(written)
    stamp = TokenBuffer(toy.tokens(written)).stamp(len(written))
    with pytest.raises(StampMismatch):
        toy.cache.insert(toy.tokens("ABCDEFGH"), slots, slot, stamp=stamp)
    toy.check()
    assert toy.match("ABCDEFGH").kv_len == 0


def test_b30_b32_a_reused_slot_is_nobodys_checkpoint_any_more(make_toy):
    toy = make_toy(num_ssm_slots=1, num_kv_slots=8)
    toy.put("ABCD")
    toy.put("WXYZ")
    assert [toy.hit("ABCD"), toy.hit("WXYZ")] == [0, 4]
    toy.put("12345678")
    assert [toy.match("ABCD").kv_len, toy.match("WXYZ").kv_len, toy.hit("12345678")] == [0, 0, 8]
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


def test_b47_after_an_overshoot_the_track_before_it_is_published(toy):
    slots = toy.compute_kv("ABCDEFG")
    newest, before = toy.compute_state("ABCDEFGH"), toy.compute_state("ABCD")
    known = TokenBuffer(toy.tokens("ABCDEFGH"))
    with pytest.raises(StampMismatch):
        toy.cache.insert(toy.tokens("ABCDEFG"), slots, newest, stamp=known.stamp(8))
    toy.insert("ABCD", slots[:4], before)
    toy.insert("ABCDEFG", slots[4:], start=4)
    assert (toy.hit("ABCDEFGH"), toy.match("ABCDEFGH").kv_len) == (4, 7)
    toy.cache.free_ssm([newest])
    toy.request_ssm.discard(newest)
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
