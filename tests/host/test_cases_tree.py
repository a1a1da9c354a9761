"""Faults that other hybrid caches have had, by the numbers of `cases.md`, as far as the tree can have them.

Each slot remembers the tokens that were folded into it, so a match that names a wrong slot fails at once.
"""

import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import StampMismatch
from mambacache_jax.host import PrefixCache, Stamp, TokenBuffer


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


def test_b02_b03_a_cap_on_checkpoints_keeps_those_where_prompts_part(make_toy):
    toy = make_toy(max_checkpoints_per_path=2)
    for suffix in "abcd":
        toy.serve("PPPPPPPP" + suffix * 6)
    assert toy.serve("PPPPPPPP" + "e" * 6).prefix_len == 8
    toy.put("PPPPPPPP" + "a" * 8)
    toy.put("PPPPPPPP" + "a" * 9)
    assert toy.hit("PPPPPPPPz") == 8
    toy.check()


def test_b10_b24_a_cap_or_a_file_leaves_every_state_at_a_page_with_the_hash_of_its_path(make_toy, tmp_path):
    toy = make_toy(page_size=4, max_checkpoints_per_path=1)
    for prompt in ("ABCDEFGHIJ", "ABCDEFXXXX", "ABCDEFGHIJKLMN"):
        toy.serve(prompt)
    toy.put("ABCDEFGHIJKLMNOP")
    assert toy.cache.stats().skipped["path_cap"] == 2
    toy.cache.save(tmp_path / "tree")
    loaded = PrefixCache.load(tmp_path / "tree")
    loaded.check_invariants()
    for prompt in ("ABCDEFXXX", "ABCDEFGHIJKLX"):
        match = loaded.match(toy.tokens(prompt))
        assert match.prefix_len == toy.hit(prompt) > 0


def test_b12_b13_one_token_less_than_a_page_of_64_matches_nothing_and_leaves_nothing(make_toy):
    toy = make_toy(page_size=64, num_kv_slots=256)
    toy.put("A" * 63 + "B")
    assert [toy.match("A" * 63).kv_len, toy.match("A" * 63 + "B").kv_len] == [0, 64]
    toy.put("A" * 63, checkpoint=False)
    toy.put("A" * 63 + "BX", checkpoint=False)
    toy.put("A" * 63 + "B" + "D" * 64)
    toy.check()
    assert toy.cache.evict(kv=1).kv == 64
    assert toy.cache.evict(kv=256).kv == 64
    assert toy.cache.stats().nodes == 0
    toy.check()


def test_b20_no_state_answers_for_fewer_tokens_than_are_folded_into_it(make_toy, page_size):
    toy = make_toy(page_size=page_size)
    toy.put("ABCDEFGHIJKL")
    for max_len in range(12):
        match = toy.match("ABCDEFGHIJKL", max_len=max_len)
        assert (match.prefix_len, match.checkpoint_slot) == (0, 0)
        assert match.branch_position == (toy.floor(max_len) or None)


def test_b26_a_state_that_the_device_never_wrote_has_the_stamp_of_what_was_there_before(toy):
    slots, slot = toy.compute_kv("ABCD"), toy.compute_state("ABCD")
    old = TokenBuffer(toy.tokens("WXYZ")).stamp(4)
    with pytest.raises(StampMismatch, match=r"has the stamp .* it is the state of others"):
        toy.cache.insert(TokenBuffer(toy.tokens("ABCD")), slots, slot, stamp=old)
    with pytest.raises(StampMismatch):
        toy.cache.insert(TokenBuffer(toy.tokens("ABCD")), slots, slot, stamp=Stamp(0, old.token_hash))
    toy.check()


def test_b30_a_reused_slot_is_nobodys_checkpoint_under_another_name_either(make_toy):
    toy = make_toy(num_ssm_slots=1)
    toy.put("ABCD", namespace="a")
    stale = toy.match("ABCD", "a")
    toy.put("ABCD", namespace="b")
    assert [toy.hit("ABCD", name) for name in ("a", "b")] == [0, 4]
    with pytest.raises(ValueError, match="checkpoint in slot 1 at position 4 has been evicted"):
        toy.cache.lock(stale)
    toy.check()
