"""What no caller may ask for is refused with a `ValueError` that names it, and nothing is changed."""

from collections.abc import Callable

import numpy as np
import pytest

from mambacache_jax.errors import StampMismatch
from mambacache_jax.host import Stamp


class Given:
    """A cache that knows ABCDEFGH (pages of 4, a checkpoint at 8), and a request with slots of its own.

    Attributes:
      own: KV slots of four pages that the request owns.
      state: an SSM slot that it owns.
      tree: the tree's KV slots.
    """

    def __init__(self, toy) -> None:
        self.toy, self.cache = toy, toy.cache
        self.tree = toy.put("ABCDEFGH").kv_slots
        self.lease = toy.cache.lock(toy.match("ABCDEFGH"))
        self.own = toy.compute_kv("X" * 16)
        self.state = toy.compute_state("X")

    def insert(self, slots, prompt="WXYZWXYZ", checkpoint_slot=0, **kwargs):
        tokens = self.toy.tokens(prompt) if isinstance(prompt, str) else prompt
        return self.cache.insert(tokens, slots, checkpoint_slot, **kwargs)


@pytest.fixture
def given(make_toy) -> Given:
    return Given(make_toy(page_size=4))


def swapped(slots):
    slots = slots.copy()
    slots[[1, 2]] = slots[[2, 1]]
    return slots


def released_twice(g: Given) -> None:
    lease = g.cache.lock(g.cache.probe(g.toy.tokens("ABCDEFGH")))
    g.cache.unlock(lease)
    g.cache.unlock(lease)


WRONG: dict[str, tuple[Callable[[Given], object], str]] = {
    "slots unsorted in a page": (lambda g: g.insert(swapped(g.own[:8])), "are no whole page of 4"),
    "slots across pages": (lambda g: g.insert(g.own[2:10]), "are no whole page of 4"),
    "overlapping pages": (lambda g: g.insert([*g.own[:4], *g.own[:4]]), r"Slot \d+ is named twice"),
    "pages that overlap by half": (lambda g: g.insert([*g.own[:4], *g.own[2:6]]), "are no whole page"),
    "a slot twice": (lambda g: g.insert([*g.own[:7], g.own[6]]), "are no whole page"),
    "slots of the tree": (lambda g: g.insert(g.tree), "belongs to the tree"),
    "slots that are free": (lambda g: g.insert(range(56, 64)), "Slot 56 is free"),
    "slots out of range": (lambda g: g.insert(range(64, 72)), "Slot 68 is out of range"),
    "slots past int32": (lambda g: g.insert([2**40] * 8), "Slot 1099511627776 is out of range"),
    "negative slots": (lambda g: g.insert(np.arange(-8, 0, dtype=np.int32)), "Slot -8 is out of range"),
    "the null page": (lambda g: g.insert(range(8)), "Slot 0 is a null slot"),
    "slots that are no integers": (lambda g: g.insert([1.5] * 8), "Slots must be integers, got float64"),
    "slots in two dimensions": (lambda g: g.insert(g.own[:8].reshape(2, 4)), r"got shape \(2, 4\)"),
    "too few slots": (lambda g: g.insert(g.own[:4]), "4 KV slots given for the positions 0 to 8"),
    "too many slots": (lambda g: g.insert(g.own[:12]), "12 KV slots given for the positions 0 to 8"),
    "kv_start inside a page": (
        lambda g: g.insert(g.own[:6], kv_start=2),
        "kv_start must be a multiple of page_size=4, got 2",
    ),
    "a negative kv_start": (lambda g: g.insert(g.own[:12], kv_start=-4), "got -4"),
    "kv_start past the tree": (
        lambda g: g.insert(g.own[:4], kv_start=4),
        "The tree has 0 of these tokens, and kv_start says 4",
    ),
    "a length past the tokens": (
        lambda g: g.insert(g.own[:9], length=9),
        r"length must be in \[0, 8\], the tokens given, got 9",
    ),
    "a negative length": (lambda g: g.insert([], length=-1), "got -1"),
    "a checkpoint slot that is free": (
        lambda g: g.insert(g.own[:8], checkpoint_slot=8),
        "Slot 8 is free",
    ),
    "a checkpoint slot of the tree": (
        lambda g: g.insert(g.own[:8], checkpoint_slot=1),
        "Slot 1 belongs to the tree",
    ),
    "a checkpoint slot out of range": (
        lambda g: g.insert(g.own[:8], checkpoint_slot=99),
        "Slot 99 is out of range",
    ),
    "a negative checkpoint slot": (
        lambda g: g.insert(g.own[:8], checkpoint_slot=-1),
        "Slot -1 is out of range",
    ),
    "a checkpoint inside a page": (
        lambda g: g.insert(g.own[:6], "WXYZWX", g.state),
        "positive multiple of page_size=4, not at 6",
    ),
    "a checkpoint of other tokens": (
        lambda g: g.insert(g.own[:8], checkpoint_slot=g.state, stamp=Stamp(8, 0)),
        "has the stamp .* state of others",
    ),
    "negative tokens": (lambda g: g.insert(g.own[:4], [1, 2, 3, -4]), r"in \[0, 2\*\*31\), got -4"),
    "tokens over int32": (lambda g: g.insert(g.own[:4], [1, 2, 3, 2**31]), "got 2147483648"),
    "negative tokens in bytes": (
        lambda g: g.insert(g.own[:4], np.array([1, 2, 3, -4], "<i4").tobytes()),
        r"in \[0, 2\*\*31\), got -4",
    ),
    "bytes that are no tokens": (lambda g: g.insert(g.own[:4], b"abc"), "3 bytes are no whole number"),
    "tokens that are no integers": (lambda g: g.insert(g.own[:4], [1.0] * 4), "got float64"),
    "tokens in two dimensions": (lambda g: g.insert(g.own[:4], [[1, 2, 3, 4]]), r"got shape \(1, 4\)"),
    "negative tokens to match": (lambda g: g.cache.match([-1] * 4), "got -1"),
    "tokens over int32 to match": (lambda g: g.cache.probe([2**31] * 4), "got 2147483648"),
    "tokens over int32 to match KV": (lambda g: g.cache.match_kv([2**63] * 4), "got 9223372036854775808"),
    "a negative max_len": (lambda g: g.cache.match([1], max_len=-1), "max_len must not be negative, got -1"),
    "a lease released twice": (released_twice, "has been released already"),
    "a pin that is none": (lambda g: g.cache.unpin(g.lease), "is no pin"),
    "an eviction of less than nothing": (lambda g: g.cache.evict(kv=-1), "got kv=-1 and ssm=0"),
    "an eviction of less than no checkpoint": (lambda g: g.cache.evict(ssm=-2), "got kv=0 and ssm=-2"),
    "part of a page": (lambda g: g.cache.allocate_kv(3), "in pages of 4, 3 were asked for"),
    "less than no slot": (lambda g: g.cache.allocate_ssm(-1), "-1 were asked for"),
    "freeing the tree's slots": (lambda g: g.cache.free_kv(g.tree), "belongs to the tree"),
    "freeing the tree's checkpoint": (lambda g: g.cache.free_ssm([1]), "belongs to the tree"),
    "freeing part of a page": (lambda g: g.cache.free_kv(g.own[:3]), "3 slots are no whole pages of 4"),
    "freeing twice": (lambda g: g.cache.free_kv([*g.own[:4], *g.own[:4]]), "is named twice"),
    "freeing what is free": (lambda g: g.cache.free_kv(range(60, 64)), "Slot 60 is free"),
    "freeing the null slot": (lambda g: g.cache.free_ssm([0]), "Slot 0 is a null slot"),
    "a reset under a lease": (lambda g: g.cache.reset(), "1 leases hold prefixes of the tree"),
    "an unknown reason": (lambda g: g.cache.count_skipped("mood"), "got 'mood'"),
    "events that are off": (lambda g: g.cache.events(), "Events are off"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_names_what_is_wrong_and_changes_nothing(given, case):
    call, message = WRONG[case]
    before = given.toy.everything()
    free = given.cache.kv[0].num_free, given.cache.ssm[0].num_free
    with pytest.raises(ValueError, match=message):
        call(given)
    assert given.toy.everything() == before
    assert (given.cache.kv[0].num_free, given.cache.ssm[0].num_free) == free
    given.toy.check()


def test_a_mismatch_of_stamps_is_a_value_error_too():
    assert issubclass(StampMismatch, ValueError)


def test_a_negative_token_past_the_length_is_refused_as_well(given):
    """The buffer is wrong, whatever part of it is asked for."""
    with pytest.raises(ValueError, match="got -1"):
        given.insert(given.own[:4], [1, 2, 3, 4, -1], length=4)
