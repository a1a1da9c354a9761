"""An insert takes over what was computed, gives back what the tree had already, and refuses what is wrong."""

import numpy as np
import pytest

from mambacache_jax.errors import StampMismatch
from mambacache_jax.host import Stamp, TokenBuffer, path_hash, token_bytes


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


def test_an_insert_from_a_lease_goes_on_where_the_lease_ends(make_toy, page_size):
    toy = make_toy(page_size=page_size)
    lease = toy.cache.lock(toy.put("ABCDEFGH"))
    slots = toy.compute_kv("ABCDEFGHIJKL", 8)
    inserted = toy.cache.insert(toy.tokens("ABCDEFGHIJKL"), slots, lease=lease)
    assert (inserted.prefix_len, inserted.position) == (8, 12)
    assert inserted.kv_slots.tolist() == slots.tolist()
    toy.request_kv -= set(slots.tolist())
    toy.cache.renew(lease, inserted)
    toy.check()
    toy.cache.unlock(lease)
    assert toy.match("ABCDEFGHIJKL").kv_len == 12


def test_a_lease_is_compared_with_all_of_the_prefix_and_not_its_last_node_alone(toy):
    toy.put("ABCD")
    lease = toy.cache.lock(toy.put("ABCDEF"))
    slots = toy.compute_kv("XXXXEFG", 6)
    with pytest.raises(ValueError, match="do not begin with the prefix of"):
        toy.cache.insert(toy.tokens("XXXXEFG"), slots, lease=lease)
    assert toy.match("ABCDEFG").kv_len == 6
    toy.cache.insert(toy.tokens("ABCDEFG"), slots, lease=lease)
    assert toy.cache.match(toy.tokens("ABCDEFG")).kv_len == 7


def test_an_insert_cannot_go_on_from_a_lease_that_ends_inside_a_node(toy):
    toy.put("ABCDEF")
    lease = toy.cache.lock(toy.cache.match_kv(toy.tokens("ABXY")), ssm=False)
    with pytest.raises(ValueError, match="leaves inside: insert without it"):
        toy.cache.insert(toy.tokens("ABXYEFGH"), toy.compute_kv("ABXYEFGH", 6), lease=lease)
    assert toy.match("ABXY").kv_len == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda toy, lease: {"namespace": "tenant"}, "holds a prefix of None, not of 'tenant'"),
        (lambda toy, lease: {"tokens": toy.tokens("ABXYEF")}, "do not begin with the prefix of"),
        (lambda toy, lease: {"tokens": toy.tokens("ABC")}, "These 3 tokens do not begin"),
        (lambda toy, lease: {"kv_start": 2}, "kv_start is 2, and .* ends at 4: leave it out"),
        (lambda toy, lease: toy.cache.unlock(lease), "has been released already"),
    ],
)
def test_an_insert_refuses_a_lease_that_is_none_on_its_prefix(toy, wrong, message):
    lease = toy.cache.lock(toy.put("ABCD"))
    slots = toy.compute_kv("EF")
    call = {"tokens": toy.tokens("ABCDEF"), "lease": lease}
    call |= wrong(toy, lease) or {}
    before = toy.cache.to_dict()
    with pytest.raises(ValueError, match=message):
        toy.cache.insert(kv_slots=slots, **call)
    assert toy.cache.to_dict() == before
