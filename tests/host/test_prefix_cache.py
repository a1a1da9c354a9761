"""`PrefixCache` finds what can be resumed, keeps its leases, and completes a call or changes nothing."""

import json

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots, StampMismatch
from mambacache_jax.host import (
    Namespace,
    NullPrefixCache,
    PrefixCache,
    Stamp,
    TokenBuffer,
    make_prefix_cache,
    path_hash,
    token_bytes,
)


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


def test_the_same_tokens_under_another_namespace_never_match(toy):
    toy.put("ABCD", namespace="tenant")
    assert toy.hit("ABCD") == 0
    assert toy.hit("ABCD", "other") == 0
    assert toy.match("ABCD", b"tenant").kv_len == 0
    assert toy.hit("ABCD", "tenant") == 4
    toy.put("ABCD")
    assert toy.cache.stats().duplicate_kv == 0
    toy.check()


def test_an_insert_frees_duplicates_and_gives_the_canonical_slots(toy):
    first = toy.put("ABCD")
    slots = toy.compute_kv("ABXY")
    second = toy.insert("ABXY", slots, toy.compute_state("ABXY"))
    assert second.prefix_len == 2
    assert second.kv_slots.tolist() == [*first.kv_slots[:2].tolist(), *slots[2:].tolist()]
    assert second.freed_kv.tolist() == slots[:2].tolist()
    assert (second.adopted, second.position) == (True, 4)
    toy.check()


def test_slots_that_are_the_trees_already_are_no_duplicates(toy):
    first = toy.put("ABCD")
    slots = np.concatenate([first.kv_slots, toy.compute_kv("ABCDEF", 4)])
    inserted = toy.insert("ABCDEF", slots)
    assert inserted.freed_kv.tolist() == []
    assert inserted.kv_slots.tolist() == slots.tolist()
    toy.check()


def test_from_kv_start_on_only_the_callers_own_slots_are_given(toy):
    toy.put("ABCD")
    slots = toy.compute_kv("ABCDEF", 4)
    inserted = toy.insert("ABCDEF", slots, start=4)
    assert (inserted.prefix_len, inserted.kv_slots.tolist(), inserted.position) == (4, slots.tolist(), 6)
    assert toy.cache.match(toy.tokens("ABCDEF")).kv_len == 6
    toy.check()


def test_a_prefix_of_a_node_is_cut_out_and_can_get_its_own_checkpoint(toy):
    toy.put("ABCDEFGH")
    slot = toy.compute_state("ABCD")
    inserted = toy.insert("ABCD", toy.compute_kv("ABCD"), slot)
    assert (inserted.prefix_len, inserted.adopted, len(inserted.freed_kv)) == (4, True, 4)
    assert (toy.hit("ABCDX"), toy.hit("ABCDEFGH")) == (4, 8)
    toy.check()


def test_a_second_checkpoint_for_the_same_prefix_stays_the_callers(toy):
    toy.put("ABCD")
    slot = toy.compute_state("ABCD")
    inserted = toy.cache.insert(toy.tokens("ABCD"), [], slot, kv_start=4)
    assert not inserted.adopted
    toy.check()
    toy.cache.free_ssm([slot])
    assert toy.cache.stats().skipped["occupied"] == 1


def test_a_tombstone_takes_a_checkpoint_again(toy):
    toy.put("ABCD")
    assert toy.cache.evict(ssm=1) == (0, 1)
    assert (toy.hit("ABCDE"), toy.match("ABCDE").branch_position) == (0, 4)
    toy.insert("ABCD", [], toy.compute_state("ABCD"), start=4)
    assert toy.hit("ABCDE") == 4
    toy.check()


def test_with_pages_the_tail_of_the_last_page_stays_the_callers(make_toy):
    toy = make_toy(page_size=4)
    slots = toy.compute_kv("ABCDEF")
    inserted = toy.insert("ABCDEF", slots[:6])
    assert inserted.kv_slots.tolist() == slots[:4].tolist()
    assert inserted.position == 4
    assert toy.request_kv == set(slots[4:].tolist())
    toy.check()


def test_with_pages_less_than_a_page_is_kept_by_nobody(make_toy):
    toy = make_toy(page_size=4)
    slots = toy.compute_kv("ABC")
    inserted = toy.insert("ABC", slots[:3])
    assert (inserted.prefix_len, inserted.kv_slots.tolist(), inserted.position) == (0, [], 0)
    toy.cache.unlock(toy.cache.lock(inserted))
    toy.check()


def test_with_pages_duplicates_are_freed_in_whole_pages(make_toy):
    toy = make_toy(page_size=4)
    first = toy.put("ABCDEFGH")
    slots = toy.compute_kv("ABCDEFGHIJKL")
    given = np.concatenate([first.kv_slots[:4], slots[4:]])
    inserted = toy.insert("ABCDEFGHIJKL", given)
    assert inserted.freed_kv.tolist() == slots[4:8].tolist()
    toy.free(slots[:4])
    toy.check()


def test_a_stamp_is_counted_from_the_tokens_if_none_is_given(toy):
    toy.put("ABCD")
    buffer = TokenBuffer(toy.tokens("ABCDEF"))
    slots, slot = toy.compute_kv("ABCDEF", 4), toy.compute_state("ABCDEF")
    inserted = toy.cache.insert(buffer, slots, slot, stamp=buffer.stamp(6), kv_start=4)
    assert inserted.adopted
    toy.request_kv, toy.request_ssm = set(), set()
    toy.check()


@pytest.mark.parametrize(
    "stamp",
    [
        Stamp(5, path_hash(token_bytes(list(b"ABCDEF")))),
        Stamp(6, path_hash(token_bytes(list(b"ABCDEX")))),
        Stamp(6, path_hash(token_bytes(list(b"ABCDE")))),
        Stamp(0, 0),
    ],
)
def test_a_checkpoint_of_other_tokens_is_refused_and_nothing_changes(toy, stamp):
    toy.put("ABCD")
    slots, slot = toy.compute_kv("ABCDEF", 4), toy.compute_state("ABCDEF")
    before = toy.cache.to_dict()
    with pytest.raises(StampMismatch, match="state of others"):
        toy.cache.insert(toy.tokens("ABCDEF"), slots, slot, stamp=stamp, kv_start=4)
    assert toy.cache.to_dict() == before
    toy.check()


@pytest.mark.parametrize("prompt", ["", "ABCDEF"])
def test_a_checkpoint_belongs_at_the_end_of_a_page(make_toy, prompt):
    toy = make_toy(page_size=4)
    slots, slot = toy.compute_kv(prompt), toy.compute_state(prompt)
    with pytest.raises(StampMismatch, match="positive multiple of page_size=4"):
        toy.cache.insert(toy.tokens(prompt), slots[: len(prompt)], slot)
    toy.check()


WRONG = {
    "too few slots": (
        lambda toy, own, tree: ("ABCDEF", own[:1], 0, 4),
        "1 KV slots given for the positions 4 to 6",
    ),
    "too many slots": (lambda toy, own, tree: ("ABCDEF", own[:3], 0, 4), "3 KV slots given"),
    "kv_start past the end": (lambda toy, own, tree: ("ABC", own[:0], 0, 4), "0 KV slots given"),
    "kv_start beyond the tree": (lambda toy, own, tree: ("ABCDEFGH", own[:2], 0, 6), "The tree has 4"),
    "negative kv_start": (lambda toy, own, tree: ("A", own[:2], 0, -1), "kv_start must be a multiple"),
    "null slot": (lambda toy, own, tree: ("ABCDEF", [own[0], 0], 0, 4), "Slot 0 is a null slot"),
    "slot out of range": (lambda toy, own, tree: ("ABCDEF", [own[0], 65], 0, 4), "Slot 65 is out of range"),
    "free slot": (lambda toy, own, tree: ("ABCDEF", [own[0], 64], 0, 4), "Slot 64 is free"),
    "slot named twice": (lambda toy, own, tree: ("ABCDEF", [own[0], own[0]], 0, 4), "is named twice"),
    "another position's slot": (
        lambda toy, own, tree: ("ABCDEF", [own[0], tree[0]], 0, 4),
        "belongs to the tree",
    ),
    "duplicate that is free": (
        lambda toy, own, tree: ("ABCD", [64, *tree[1:4]], 0, 0),
        "Slot 64 is free",
    ),
    "duplicate of another position": (
        lambda toy, own, tree: ("ABCD", [tree[1], tree[1], *tree[2:4]], 0, 0),
        "belongs to the tree",
    ),
    "duplicate given as new": (
        lambda toy, own, tree: ("ABCDEF", [own[0], *tree[1:4], own[1], own[0]], 0, 0),
        "is named twice",
    ),
    "free checkpoint": (lambda toy, own, tree: ("ABCDEF", own[:2], 8, 4), "Slot 8 is free"),
    "checkpoint out of range": (lambda toy, own, tree: ("ABCDEF", own[:2], 9, 4), "Slot 9 is out of range"),
    "negative checkpoint": (lambda toy, own, tree: ("ABCDEF", own[:2], -1, 4), "Slot -1 is out of range"),
    "the tree's checkpoint": (lambda toy, own, tree: ("ABCDEF", own[:2], 1, 4), "Slot 1 belongs to the tree"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_insert_says_what_is_wrong_and_changes_nothing(toy, case):
    tree = toy.put("ABCD").kv_slots.tolist()
    own = toy.compute_kv("ABCDEFG", 4).tolist()
    build, message = WRONG[case]
    prompt, slots, checkpoint_slot, kv_start = build(toy, own, tree)
    before = toy.cache.to_dict()
    with pytest.raises(ValueError, match=message):
        toy.cache.insert(toy.tokens(prompt), slots, checkpoint_slot, kv_start=kv_start)
    with pytest.raises(ValueError, match=message):
        toy.cache.insert(toy.tokens(prompt), slots, checkpoint_slot, kv_start=kv_start, stamp=Stamp(9, 9))
    assert toy.cache.to_dict() == before
    toy.check()


def test_a_page_that_is_partly_the_trees_is_refused(make_toy):
    toy = make_toy(page_size=4)
    tree = toy.put("ABCD").kv_slots
    own = toy.compute_kv("ABCD")
    with pytest.raises(ValueError, match="no whole page"):
        toy.cache.insert(toy.tokens("ABCD"), [*tree[:2], *own[2:]])
    toy.check()


def test_a_tree_slot_cannot_be_freed_by_a_caller(toy):
    inserted = toy.put("ABCD")
    with pytest.raises(ValueError, match="belongs to the tree"):
        toy.cache.free_kv(inserted.kv_slots)
    with pytest.raises(ValueError, match="belongs to the tree"):
        toy.cache.free_ssm([inserted.node.checkpoint_slot])
    toy.check()


def test_a_lease_keeps_kv_and_checkpoint(toy):
    toy.put("ABCD")
    lease = toy.cache.lock(toy.match("ABCD"))
    assert (toy.cache.evictable_kv(), toy.cache.evictable_ssm()) == (0, 0)
    assert toy.cache.evict(kv=64, ssm=8) == (0, 0)
    toy.cache.unlock(lease)
    assert (toy.cache.evictable_kv(), toy.cache.evictable_ssm()) == (4, 1)
    assert toy.cache.evict(kv=1) == (4, 1)
    toy.check()


def test_a_lease_without_the_checkpoint_keeps_the_kv_only(toy):
    toy.put("ABCD")
    lease = toy.cache.lock(toy.match("ABCD"), ssm=False)
    assert toy.cache.evict(kv=64, ssm=8) == (0, 1)
    assert toy.match("ABCD").kv_len == 4
    toy.cache.unlock(lease)
    toy.check()


def test_relaxing_a_lease_releases_its_checkpoint_once(toy):
    toy.put("ABCD")
    match = toy.match("ABCD")
    lease, other = toy.cache.lock(match), toy.cache.lock(match)
    assert toy.cache.relax(lease) is lease
    toy.cache.relax(lease)
    assert toy.cache.evictable_ssm() == 0
    toy.check()
    toy.cache.relax(other)
    assert (toy.cache.evictable_ssm(), toy.cache.evictable_kv()) == (1, 0)
    toy.cache.unlock(lease)
    assert toy.cache.evictable_kv() == 0
    toy.cache.unlock(other)
    assert toy.cache.evictable_kv() == 4
    for call in (toy.cache.unlock, toy.cache.relax):
        with pytest.raises(ValueError, match="released already"):
            call(lease)
    toy.check()


def test_a_lease_on_a_miss_locks_nothing(toy):
    toy.put("ABCD")
    lease = toy.cache.lock(toy.match("XYZ"))
    assert toy.cache.evictable_kv() == 4
    toy.cache.reset()
    toy.cache.unlock(lease)
    with pytest.raises(ValueError, match="released already"):
        toy.cache.unlock(lease)


def test_a_match_that_is_no_longer_true_cannot_be_locked(toy):
    toy.put("ABCD")
    stale = toy.match("ABCD")
    toy.cache.evict(ssm=1)
    with pytest.raises(ValueError, match="checkpoint in slot 1 at position 4 has been evicted"):
        toy.cache.lock(stale)
    toy.cache.unlock(toy.cache.lock(stale, ssm=False))
    toy.cache.evict(kv=4)
    for ssm in (True, False):
        with pytest.raises(ValueError, match="has been evicted since"):
            toy.cache.lock(stale, ssm=ssm)
    toy.check()


def test_a_match_can_be_locked_after_its_node_was_split(toy):
    toy.put("ABCDEFGH")
    match = toy.match("ABCDEFGH")
    toy.put("ABCDXY")
    lease = toy.cache.lock(match)
    assert toy.cache.evict(kv=64) == (2, 1)
    assert toy.hit("ABCDEFGH") == 8
    toy.cache.unlock(lease)
    toy.check()


def test_a_lease_survives_the_split_of_its_node(toy):
    lease = toy.cache.lock(toy.put("ABCDEFGH"))
    toy.put("ABCDXY")
    toy.check()
    assert toy.cache.evict(kv=64, ssm=8).kv == 2
    assert toy.hit("ABCDEFGH") == 8
    toy.cache.unlock(lease)
    assert toy.cache.evict(kv=64) == (8, 1)
    toy.check()


def test_a_locked_tombstone_protects_the_checkpoint_that_it_receives(toy):
    lease = toy.cache.lock(toy.put("ABCD", checkpoint=False))
    toy.insert("ABCD", [], toy.compute_state("ABCD"), start=4)
    toy.check()
    assert toy.cache.evictable_ssm() == 0
    assert toy.cache.evict(ssm=8) == (0, 0)
    toy.cache.unlock(lease)
    assert toy.cache.evictable_ssm() == 1
    toy.check()


def test_a_tombstone_held_for_its_kv_alone_does_not_protect_it(toy):
    lease = toy.cache.lock(toy.put("ABCD", checkpoint=False), ssm=False)
    toy.insert("ABCD", [], toy.compute_state("ABCD"), start=4)
    assert toy.cache.evict(ssm=8) == (0, 1)
    toy.cache.unlock(lease)
    toy.check()


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


def test_the_tree_can_be_read(toy):
    toy.put("ABCD")
    toy.put("ABXY")
    lease = toy.cache.lock(toy.put("AB", checkpoint=False, namespace="tenant"))
    assert toy.cache.render(lambda tokens: "".join(map(chr, tokens))).splitlines() == [
        "root",
        "└── [AB] to 2: kv 1..2, tombstone",
        "    ├── [CD] to 4: kv 3..4, ssm 1",
        "    └── [XY] to 4: kv 7..8, ssm 2",
        "root 'tenant'",
        "└── [AB] to 2: kv 5..6, tombstone, held 1, ssm lock 1",
    ]
    assert toy.cache.render().splitlines()[2] == "    ├── [67 68] to 4: kv 3..4, ssm 1"
    toy.cache.unlock(lease)
    toy.put("ABCDEFGHIJKL")
    assert "[69 70 71 72 73 74 75 76] to 12" in toy.cache.render()
    toy.put("Z" * 9)
    assert "[90 90 90 90 90 90 90 90 … 9 tokens] to 9" in toy.cache.render()


def test_the_tree_can_be_written_as_json(toy):
    toy.put("ABCD")
    toy.put("ABXY", checkpoint=False)
    toy.put("A", namespace=Namespace("tenant", version=1))
    plain, tenant = json.loads(json.dumps(toy.cache.to_dict()))["roots"]
    assert (plain["namespace"], tenant["namespace"]) == (
        None,
        "Namespace(adapter='tenant', salt=None, version=1)",
    )
    (upper,) = plain["children"]
    assert (upper["tokens"], upper["position"], upper["checkpoint_slot"]) == ([65, 66], 2, 0)
    assert [child["tokens"] for child in upper["children"]] == [[67, 68], [88, 89]]
    assert [child["checkpoint_slot"] for child in upper["children"]] == [1, 0]
    assert (upper["kv_slots"], upper["held"], upper["ssm_lock"]) == ([1, 2], 0, 0)


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
