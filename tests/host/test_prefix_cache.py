"""`PrefixCache` finds what can be resumed, evicts what it must, and completes a call or changes nothing."""

import numpy as np
import pytest

from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host import TokenBuffer, token_bytes


def test_an_empty_cache_matches_nothing(toy):
    match = toy.match("ABCD")
    assert (match.prefix_len, match.kv_slots.tolist(), match.checkpoint_slot) == (0, [], 0)
    assert (match.kv_len, match.branch_position) == (0, None)


def test_a_match_ends_at_the_deepest_checkpoint_and_tells_how_far_kv_reaches(toy):
    toy.put("ABCD")
    toy.put("ABCDEFGH", checkpoint=False)
    match = toy.match("ABCDEFXY")
    assert (match.prefix_len, match.kv_len, match.branch_position) == (4, 6, 6)
    assert toy.match("ABCDXY").branch_position is None
    toy.check()


def test_nobody_can_write_to_the_tree_through_a_match(toy):
    toy.put("ABCD")
    toy.put("ABCDEF")
    for prompt in ("ABCD", "ABCDEF"):
        match = toy.match(prompt)
        assert match.kv_slots.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            match.kv_slots[:] = -1
        assert toy.hit(prompt) == len(prompt)


@pytest.mark.parametrize("max_len", range(7))
def test_max_len_caps_hit_and_kv_alike(toy, max_len):
    toy.put("AB")
    toy.put("ABCD")
    match = toy.match("ABCDEF", max_len=max_len)
    assert match.prefix_len == (4 if max_len >= 4 else 2 if max_len >= 2 else 0)
    assert match.kv_len == min(max_len, 4)


def test_a_negative_max_len_is_refused(toy):
    with pytest.raises(ValueError, match="max_len"):
        toy.match("A", max_len=-1)


@pytest.mark.parametrize("kind", [list, bytes, TokenBuffer, np.asarray])
def test_tokens_may_come_in_any_form(toy, kind):
    toy.put("ABCD")
    tokens = toy.tokens("ABCDE")
    given = token_bytes(tokens) if kind is bytes else kind(tokens)
    assert toy.cache.match(given).prefix_len == 4


def test_a_match_changes_no_node(toy):
    toy.put("ABCD")
    toy.put("ABXY", checkpoint=False)
    before = toy.cache.to_dict()
    for prompt in ("A", "ABC", "ABCDE", "ABXY", "Z", ""):
        toy.match(prompt)
    assert toy.cache.to_dict() == before


def test_evicting_a_checkpoint_keeps_the_kv_and_evicting_kv_takes_the_checkpoint(toy):
    toy.put("AB")
    toy.put("ABCD")
    assert toy.cache.evict(ssm=1) == (0, 1)
    assert toy.match("AB").kv_len == 2
    assert toy.hit("ABCD") == 4
    assert toy.cache.evict(kv=1) == (2, 1)
    assert toy.match("ABCD").kv_len == 2
    toy.check()


def test_an_eviction_of_both_counts_what_went_with_the_kv(toy):
    toy.put("AB")
    toy.put("CD")
    assert toy.cache.evict(kv=1, ssm=1) == (2, 1)
    assert toy.cache.evict(kv=0, ssm=5) == (0, 1)
    with pytest.raises(ValueError, match="must not be negative"):
        toy.cache.evict(kv=-1)
    toy.check()


def test_a_match_makes_its_node_the_last_to_be_evicted_and_its_ancestors_no_more_recent(toy):
    toy.put("A")
    toy.put("AB")
    toy.put("X")
    assert toy.hit("AB") == 2
    assert toy.cache.evict(ssm=1) == (0, 1)
    assert (toy.hit("A"), toy.hit("X"), toy.hit("AB")) == (0, 1, 2)
    assert toy.cache.evict(kv=1) == (1, 1)
    assert (toy.hit("X"), toy.hit("AB")) == (0, 2)


def test_an_insert_of_what_is_known_leaves_the_order_of_eviction_alone(toy):
    """Only a match shows that something was of use: what a repeated prompt never hit goes first."""
    toy.put("AB")
    toy.put("XY")
    toy.put("AB")
    assert toy.cache.evict(ssm=1) == (0, 1)
    assert (toy.hit("XY"), toy.hit("AB")) == (2, 0)
    toy.put("AB")
    toy.put("XY", checkpoint=False)
    assert toy.cache.evict(ssm=1) == (0, 1)
    assert (toy.hit("XY"), toy.hit("AB")) == (0, 2)


def test_allocation_evicts_only_as_much_as_it_needs(toy):
    for letter in "ABCDEFGH":
        toy.put(letter * 8)
    assert toy.cache.kv[0].num_free == toy.cache.ssm[0].num_free == 0
    assert len(toy.cache.allocate_kv(9)) == 9
    stats = toy.cache.stats()
    assert (stats.kv_evicted, stats.ssm_lost_with_kv, stats.ssm_evicted) == (16, 2, 0)
    assert len(toy.cache.allocate_ssm(3)) == 3
    stats = toy.cache.stats()
    assert (stats.ssm_evicted, stats.tombstones, stats.nodes) == (1, 1, 6)


def test_an_allocation_that_cannot_succeed_evicts_nothing(toy):
    toy.put("ABCD")
    lease = toy.cache.lock(toy.put("XY"))
    before = toy.cache.to_dict()
    with pytest.raises(
        OutOfSlots,
        match=r"^KV pool: 63 slots needed, 58 free and 4 evictable of 64\. Finish a request, or raise",
    ):
        toy.cache.allocate_kv(63)
    with pytest.raises(
        OutOfSlots, match=r"^SSM pool: 8 slots needed, 6 free and 1 evictable of 8\. .*num_ssm_slots"
    ):
        toy.cache.allocate_ssm(8)
    assert toy.cache.to_dict() == before
    assert len(toy.cache.allocate_kv(62)) == 62
    toy.cache.unlock(lease)


def test_part_of_a_page_or_less_than_nothing_is_not_allocated(make_toy):
    toy = make_toy(page_size=4)
    toy.put("ABCDEFGH" * 8)
    for count in (3, -4):
        with pytest.raises(ValueError, match="in pages of 4"):
            toy.cache.allocate_kv(count)
    with pytest.raises(ValueError, match="in pages of 1"):
        toy.cache.allocate_ssm(-1)
    toy.check()


def test_a_reset_forgets_the_tree_and_leaves_requests_their_slots(toy):
    inserted = toy.put("ABCD", namespace="tenant")
    toy.put("AB")
    stale = toy.match("AB")
    own = toy.compute_kv("XY")
    toy.cache.reset()
    toy.check()
    assert (toy.hit("ABCD", "tenant"), toy.hit("AB")) == (0, 0)
    assert toy.cache.kv[0].num_used == 2
    for where in (inserted, stale):
        with pytest.raises(ValueError, match="evicted since"):
            toy.cache.lock(where)
    toy.put("ABCD")
    toy.free(own)
    toy.check()


def test_a_reset_under_a_lease_is_refused(toy):
    lease = toy.cache.lock(toy.put("ABCD"), ssm=False)
    with pytest.raises(ValueError, match="1 leases hold prefixes of the tree, 4 KV slots"):
        toy.cache.reset()
    assert toy.hit("ABCD") == 4
    toy.cache.unlock(lease)
    toy.cache.reset()
    toy.check()


def test_the_recount_sees_slots_that_leaked_and_slots_owned_twice(toy):
    inserted = toy.put("ABCD")
    own = toy.cache.allocate_kv(1)
    with pytest.raises(AssertionError, match=r"have lost \[5\]"):
        toy.cache.check_invariants()
    toy.cache.check_invariants(own.tolist())
    with pytest.raises(AssertionError, match="without the allocator's knowledge"):
        toy.cache.check_invariants([*own.tolist(), int(inserted.kv_slots[0])])
    toy.cache.allocate_ssm()
    with pytest.raises(AssertionError, match=r"have lost \[2\]"):
        toy.cache.check_invariants(own.tolist())


@pytest.mark.parametrize("look", ["probe", "match_kv"])
def test_neither_a_probe_nor_a_match_of_kv_is_a_use(toy, look):
    toy.put("AB")
    toy.put("XY")
    assert getattr(toy.cache, look)(toy.tokens("AB")).kv_len == 2
    assert toy.cache.evict(ssm=1) == (0, 1)
    assert toy.cache.evict(kv=1) == (2, 0)
    assert (toy.match("AB").kv_len, toy.hit("XY")) == (0, 2)
