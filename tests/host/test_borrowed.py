"""Under a caller's own allocators the tree owns what it adopted, gives it back, and survives a refusal."""

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host import PrefixCache
from mambacache_jax.host.borrowed import BorrowedSlots

from .plain_allocator import PlainAllocator, Refused


class Borrower:
    """A cache over a caller's allocators, and how to fill it."""

    def __init__(self, page_size: int = 1, **rules) -> None:
        self.kv, self.ssm = PlainAllocator(16, page_size), PlainAllocator(4)
        self.config = CacheConfig(16, 4, page_size, track_interval=256, **rules)
        self.cache = PrefixCache(self.config, kv=[self.kv], ssm=[self.ssm])

    def put(self, tokens):
        slots, (slot,) = self.cache.allocate_kv(len(tokens)), self.cache.allocate_ssm()
        return self.cache.insert(tokens, slots, slot)

    def free_slots(self):
        return self.kv.num_free, self.ssm.num_free


@pytest.fixture
def borrower():
    return Borrower()


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_come_from_the_caller_and_go_back_to_it(page_size):
    borrower = Borrower(page_size)
    cache = borrower.cache
    inserted = borrower.put(range(8))
    assert inserted.kv_slots.tolist() == list(range(page_size, 8 + page_size))
    assert borrower.free_slots() == (8, 3)
    own = cache.allocate_kv(4)
    cache.free_kv(own)
    cache.free_ssm(cache.allocate_ssm())
    assert cache.evict(kv=1) == (8, 1)
    assert borrower.free_slots() == (16, 4)
    cache.check_invariants()


def test_the_caller_may_allocate_beside_the_tree_which_evicts_by_its_count(borrower):
    borrower.put([1, 2, 3, 4])
    theirs = borrower.kv.allocate(10)
    assert (borrower.cache.kv[0].num_free, borrower.cache.kv[0].num_used) == (2, 14)
    assert len(borrower.cache.allocate_kv(2)) == 2
    assert borrower.cache.stats().nodes == 1
    assert len(borrower.cache.allocate_kv(1)) == 1
    assert borrower.cache.stats().nodes == 0
    with pytest.raises(OutOfSlots, match="KV pool: 4 slots needed, 3 free and 0 evictable of 16"):
        borrower.cache.allocate_kv(4)
    borrower.kv.free(theirs)
    borrower.cache.check_invariants()


def test_duplicates_go_back_to_the_caller(borrower):
    borrower.put([1, 2, 3, 4])
    inserted = borrower.put([1, 2, 3, 9])
    assert inserted.freed_kv.tolist() == [5, 6, 7]
    assert borrower.kv.num_free == 11
    borrower.cache.free_ssm([2]) if not inserted.adopted else None
    borrower.cache.check_invariants()


def test_a_reset_gives_everything_back(borrower):
    borrower.put([1, 2, 3, 4])
    borrower.put([5])
    borrower.cache.reset()
    assert borrower.free_slots() == (16, 4)
    borrower.put([1])
    borrower.cache.reset(None)
    assert borrower.free_slots() == (16, 4)
    borrower.cache.check_invariants()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([9, 1], "Slot 1 belongs to the tree"),
        ([9, 9], "Slot 9 is named twice"),
        ([0, 9], "Slot 0 is a null slot"),
        ([9, 17], "Slot 17 is out of range"),
        ([9, -1], "Slot -1 is out of range"),
    ],
)
def test_what_cannot_be_a_request_s_slot_is_refused(borrower, slots, message):
    borrower.put([1, 2])
    before = borrower.cache.to_dict()
    with pytest.raises(ValueError, match=message):
        borrower.cache.insert([5, 6], slots)
    with pytest.raises(ValueError, match=message):
        borrower.cache.free_kv(slots)
    with pytest.raises(ValueError, match="belongs to the tree"):
        borrower.cache.insert([1, 2, 3], borrower.cache.allocate_kv(1), 1, kv_start=2)
    assert borrower.cache.to_dict() == before
    assert borrower.free_slots() == (13, 3)
    borrower.cache.check_invariants()


def test_an_allocation_that_the_caller_refuses_changes_nothing(borrower):
    borrower.put([1, 2])
    before = borrower.cache.to_dict()
    borrower.kv.refuse_at = borrower.ssm.refuse_at = 0
    with pytest.raises(OutOfSlots, match="2 slots are refused"):
        borrower.cache.allocate_kv(2)
    with pytest.raises(OutOfSlots, match="1 slots are refused"):
        borrower.cache.allocate_ssm()
    assert borrower.cache.to_dict() == before
    borrower.cache.check_invariants()


def test_a_free_that_the_caller_refuses_changes_nothing(borrower):
    own, state = borrower.cache.allocate_kv(2), borrower.cache.allocate_ssm()
    borrower.kv.refuse_at = borrower.ssm.refuse_at = 0
    with pytest.raises(Refused):
        borrower.cache.free_kv(own)
    with pytest.raises(Refused):
        borrower.cache.free_ssm(state)
    assert borrower.cache.kv[0].num_used == 2
    borrower.cache.free_kv(own)
    borrower.cache.free_ssm(state)
    assert borrower.free_slots() == (16, 4)


@pytest.mark.parametrize("pool", ["kv", "ssm"])
@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.evict(kv=1),
        lambda cache: cache.evict(kv=8, ssm=4),
        lambda cache: cache.reset(),
        lambda cache: cache.reset(None),
    ],
    ids=["one leaf", "all", "reset", "reset one"],
)
def test_what_the_caller_will_not_take_back_stops_nothing_and_is_offered_again(borrower, pool, call):
    """Its checkpoint's slot refused after the KV was free, a leaf would be gone by half."""
    borrower.put([1, 2, 3, 4])
    twin = Borrower()
    twin.put([1, 2, 3, 4])
    getattr(borrower, pool).refuse_at = 0
    assert call(borrower.cache) == call(twin.cache)
    assert getattr(borrower, pool).refused
    assert borrower.cache.stats() == twin.cache.stats()
    assert borrower.free_slots() != (16, 4)
    borrower.cache.check_invariants()
    assert sorted(borrower.cache.allocate_kv(16).tolist()) == list(range(1, 17))
    assert sorted(borrower.cache.allocate_ssm(4).tolist()) == [1, 2, 3, 4]


def test_duplicates_and_checkpoints_past_the_cap_that_are_not_taken_back_stop_no_insert():
    borrower = Borrower(max_checkpoints_per_path=1)
    borrower.put([1, 2])
    borrower.kv.refuse_at = borrower.ssm.refuse_at = 2
    slots, (slot,) = borrower.cache.allocate_kv(3), borrower.cache.allocate_ssm()
    borrower.kv.refuse_at = borrower.ssm.refuse_at = 0
    inserted = borrower.cache.insert([1, 2, 3], slots, slot)
    assert (inserted.freed_kv.tolist(), inserted.adopted) == (slots[:2].tolist(), True)
    assert borrower.cache.stats().skipped["path_cap"] == 1
    assert borrower.free_slots() == (11, 2)
    assert (borrower.cache.kv[0].num_free, borrower.cache.ssm[0].num_free) == (13, 3)
    borrower.cache.check_invariants()
    borrower.cache.allocate_kv(0)
    borrower.cache.allocate_ssm(0)
    assert borrower.free_slots() == (13, 3)


def test_what_is_refused_again_is_told_by_the_next_call_and_nothing_is_lost(borrower):
    borrower.put([1, 2])
    borrower.kv.refuse_at = 0
    borrower.cache.evict(kv=2)
    for call in (lambda: borrower.cache.allocate_kv(1), lambda: borrower.cache.free_kv([9])):
        borrower.kv.refuse_at = 0
        with pytest.raises(Refused, match=r"\[1 2\] are not taken back"):
            call()
    assert borrower.cache.kv[0].num_free == 16
    borrower.cache.allocate_kv(0)
    assert borrower.kv.num_free == 16


def test_where_a_caller_promised_more_than_it_gives_the_eviction_stays(borrower):
    borrower.put(list(range(16)))
    borrower.kv.refuse_at = 1
    with pytest.raises(OutOfSlots, match="slots are refused"):
        borrower.cache.allocate_kv(4)
    assert (borrower.kv.num_free, borrower.cache.stats().nodes) == (16, 0)
    borrower.cache.check_invariants()


def test_each_shard_needs_an_allocator():
    with pytest.raises(ValueError, match="kv must have an allocator for each of 2 shards, got 1"):
        PrefixCache(CacheConfig(4, 1, num_shards=2), kv=[PlainAllocator(4)])
    with pytest.raises(ValueError, match="ssm must have an allocator for each of 1 shards, got 0"):
        PrefixCache(CacheConfig(4, 1), ssm=[])


def test_one_slot_comes_as_an_int():
    slots = BorrowedSlots(PlainAllocator(4), 4)
    assert (slots.allocate_one(), slots.num_slots, slots.num_free) == (1, 4, 3)


def test_a_loaded_tree_owns_slots_that_the_caller_took_out_for_it(borrower, tmp_path):
    inserted = borrower.put([1, 2, 3])
    borrower.cache.save(tmp_path / "tree")
    kv, ssm = PlainAllocator(16), PlainAllocator(4)
    kv.take(inserted.kv_slots)
    ssm.take(np.array([1]))
    loaded = PrefixCache.load(tmp_path / "tree", kv=[kv], ssm=[ssm])
    loaded.check_invariants()
    assert loaded.evict(kv=1) == (3, 1)
    assert (kv.num_free, ssm.num_free) == (16, 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda slots: slots.check_invariants([1, 2, 2], []), "owns a slot twice"),
        (lambda slots: slots.check_invariants([1, 2, 3], []), r"owns \[1, 2, 3\], and adopted \[1, 2\]"),
        (lambda slots: slots.check_invariants([1], []), r"owns \[1\], and adopted \[1, 2\]"),
        (lambda slots: slots.check_invariants([1, 2], [2, 3]), r"both own \[2\]"),
    ],
)
def test_the_recount_sees_what_is_owned_twice_or_by_nobody(damage, message):
    slots = BorrowedSlots(PlainAllocator(4), 4)
    slots.claim([1, 2])
    slots.check_invariants([1, 2], [3])
    with pytest.raises(AssertionError, match=message):
        damage(slots)
