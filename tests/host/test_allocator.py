"""The allocator gives each slot to one owner at a time, in an order that repeats, and refuses misuse."""

import numpy as np
import pytest

from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host import SlotAllocator


def test_slots_start_after_the_null_page_and_end_with_the_pool():
    assert SlotAllocator(4).allocate(4).tolist() == [1, 2, 3, 4]
    assert SlotAllocator(8, 4).allocate(8).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_an_allocation_is_int32_and_never_a_view_of_the_free_list():
    allocator = SlotAllocator(6)
    first = allocator.allocate(3)
    assert first.dtype == np.int32
    assert first.base is None
    first[:] = -1
    assert allocator.allocate(3).tolist() == [4, 5, 6]


def test_what_was_freed_last_is_handed_out_first_and_in_ascending_order():
    allocator = SlotAllocator(8)
    allocator.allocate(6)
    allocator.free([5, 2])
    allocator.free([3])
    assert allocator.allocate(3).tolist() == [2, 3, 5]
    assert allocator.allocate(1).tolist() == [7]


@pytest.mark.parametrize("page_size", [1, 4])
def test_free_and_used_always_add_up(page_size):
    allocator = SlotAllocator(8 * page_size, page_size)
    slots = allocator.allocate(3 * page_size)
    assert (allocator.num_free, allocator.num_used) == (5 * page_size, 3 * page_size)
    allocator.free(slots)
    assert (allocator.num_free, allocator.num_used, allocator.num_slots) == (8 * page_size, 0, 8 * page_size)
    assert allocator.page_size == page_size


def test_one_slot_comes_as_an_int():
    allocator = SlotAllocator(2)
    slots = [allocator.allocate_one(), allocator.allocate_one()]
    assert slots == [1, 2]
    assert type(slots[0]) is int
    with pytest.raises(OutOfSlots):
        allocator.allocate_one()
    with pytest.raises(ValueError, match="pages of 4"):
        SlotAllocator(8, 4).allocate_one()


def test_too_large_an_allocation_names_the_numbers_and_changes_nothing():
    allocator = SlotAllocator(4)
    allocator.allocate(1)
    with pytest.raises(OutOfSlots, match=r"4 slots needed, 3 free of 4\."):
        allocator.allocate(4)
    assert allocator.allocate(3).tolist() == [2, 3, 4]


def test_nothing_may_be_asked_for_and_given_back():
    allocator = SlotAllocator(4, 2)
    assert allocator.allocate(0).tolist() == []
    allocator.free([])
    assert allocator.num_free == 4


@pytest.mark.parametrize("count", [-2, 3])
def test_part_of_a_page_cannot_be_allocated(count):
    with pytest.raises(ValueError, match="in pages of 2"):
        SlotAllocator(8, 2).allocate(count)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([2, 0], "Slot 0 is a null slot"),
        ([2, 9], "Slot 9 is out of range: slots are 1 to 8"),
        ([2, -1], "Slot -1 is out of range"),
        ([2, 2**40], "out of range"),
        ([2, 7], "Slot 7 is free"),
        ([7], "Slot 7 is free"),
        ([9], "out of range"),
        ([0], "null slot"),
        ([2, 3, 2], "Slot 2 is named twice"),
        ([2, 5], "Slot 5 belongs to the tree"),
        ([1.5, 2.0], "integers"),
        ([[1, 2]], "one-dimensional"),
    ],
)
def test_a_wrong_free_names_the_slot_and_changes_nothing(slots, message):
    allocator = SlotAllocator(8)
    allocator.allocate(6)
    allocator.adopt_one(5)
    with pytest.raises(ValueError, match=message):
        allocator.free(slots)
    with pytest.raises(ValueError, match=message):
        allocator.free(np.array(slots))
    allocator.check_invariants(adopted=[5], used=[1, 2, 3, 4, 6])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([4, 5, 6], "no whole pages"),
        ([4, 5, 6, 8], r"\[4, 5, 6, 8\] are no whole page"),
        ([5, 6, 7, 8], "no whole page"),
        ([4, 6, 5, 7], "no whole page"),
        ([0, 1, 2, 3], "Slot 0 is a null slot"),
        ([12, 13, 14, 15], "Slot 12 is free"),
        ([4, 5, 6, 7, 4, 5, 6, 7], "Slot 4 is named twice"),
        ([16, 17, 18, 19], "Slot 16 is out of range: slots are 4 to 15"),
    ],
)
def test_only_whole_pages_are_taken_back(slots, message):
    allocator = SlotAllocator(12, 4)
    held = allocator.allocate(8)
    with pytest.raises(ValueError, match=message):
        allocator.free(slots)
    allocator.check_invariants(adopted=[], used=held.tolist())


def test_a_double_free_is_refused_at_the_second():
    allocator = SlotAllocator(4)
    slots = allocator.allocate(2)
    allocator.free(slots)
    with pytest.raises(ValueError, match="is free"):
        allocator.free(slots)
    assert allocator.num_free == 4


def test_the_recount_sees_a_slot_that_nobody_owns_and_one_with_two_owners():
    allocator = SlotAllocator(4)
    allocator.allocate(2)
    allocator.check_invariants(adopted=[], used=[1, 2])
    with pytest.raises(AssertionError, match=r"have lost \[2\]"):
        allocator.check_invariants(adopted=[], used=[1])
    with pytest.raises(AssertionError, match="own a slot twice"):
        allocator.check_invariants(adopted=[], used=[1, 2, 2])
    with pytest.raises(AssertionError, match=r"own \[2\] without"):
        allocator.check_invariants(adopted=[2], used=[1, 2])


@pytest.mark.parametrize(("num_slots", "page_size"), [(0, 1), (6, 4), (2, 4), (4, 0)])
def test_a_pool_has_whole_pages(num_slots, page_size):
    with pytest.raises(ValueError, match="multiple of page_size"):
        SlotAllocator(num_slots, page_size)
