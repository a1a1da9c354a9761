"""Free slots that someone else keeps: the allocators of a serving stack, under a tree of ours."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mambacache_jax.host.allocator import Pages, SlotAllocator, Slots


class CallerAllocator(Protocol):
    """What the tree needs of an allocator that it does not own.

    Slots are numbered as `SlotAllocator` does: page 0 is the null page. `free` must take back whatever
    `allocate` handed out; where it raises, the call of the tree that caused it changes nothing.
    """

    @property
    def num_free(self) -> int:
        """Slots that `allocate` could hand out now."""
        ...

    def allocate(self, num_slots: int) -> np.ndarray:
        """Takes slots, whole pages; an int32 array. Raises `OutOfSlots` with nothing changed."""
        ...

    def free(self, slots: np.ndarray) -> None:
        """Takes slots back, whole pages."""
        ...


class BorrowedSlots(SlotAllocator):
    """A caller's allocator. Who owns which slot is the caller's affair, and so is naming its own.

    The caller may allocate and free without the tree's knowledge, so nothing is kept here. Slots must exist
    and fill pages; whether they were the caller's to give, `check_invariants` alone can tell.
    """

    def __init__(self, caller: CallerAllocator, num_slots: int, page_size: int = 1) -> None:
        """Wraps a caller's allocator over slots `page_size` to `num_slots + page_size - 1`."""
        super().__init__(num_slots, page_size)
        self._caller = caller

    @property
    def num_free(self) -> int:
        """Slots that nobody owns, by the caller's count."""
        return self._caller.num_free

    @property
    def num_used(self) -> int:
        """Slots that a request or the tree owns, by the caller's count."""
        return self.num_slots - self._caller.num_free

    def allocate(self, num_slots: int) -> np.ndarray:
        """Takes slots from the caller's allocator, which may raise `OutOfSlots`."""
        return self._caller.allocate(num_slots)

    def allocate_one(self) -> int:
        """Takes one slot from the caller's allocator, which may raise `OutOfSlots`."""
        return int(self._caller.allocate(1)[0])

    def validate(self, slots: Slots) -> Pages:
        """The pages of `slots`, which must exist."""
        numbers = self.as_int32(slots)
        if self.page_size > 1:
            numbers = self._whole_pages(numbers)
        if len(numbers) and (numbers.min() < 1 or numbers.max() > self.num_slots // self.page_size):
            outside = (numbers < 1) | (numbers > self.num_slots // self.page_size)
            raise ValueError(self._out_of_range(int(numbers[outside][0]) * self.page_size))
        return numbers, []

    def validate_one(self, slot: int) -> None:
        """`validate` for one slot, where a page is one slot."""
        if not 1 <= slot <= self.num_slots:
            raise ValueError(self._out_of_range(slot))

    def exchange(self, freed: np.ndarray, adopted: np.ndarray) -> None:
        """Gives slots back to the caller's allocator; the tree takes over others."""
        self.validate(adopted)
        if len(freed):
            self.free_pages(self.validate(freed))

    def adopt_one(self, slot: int) -> None:
        """The tree takes over a slot that `validate_one` accepted."""

    def free_pages(self, pages: Pages) -> None:
        """Gives pages back to the caller's allocator."""
        numbers = pages[0]
        if self.page_size > 1:
            numbers = (numbers[:, None] * self.page_size + self._offsets).ravel()
        self._caller.free(numbers)

    def free_adopted(self, slots: np.ndarray) -> None:
        """Gives slots of the tree back to the caller's allocator."""
        self._caller.free(slots)

    def free_one(self, slot: int) -> None:
        """Gives one slot back to the caller's allocator."""
        self._caller.free(np.array([slot], np.int32))

    def free_every_adopted(self, adopted: Callable[[], np.ndarray]) -> None:
        """Gives all that the tree adopted back to the caller's allocator."""
        if len(slots := adopted()):
            self._caller.free(slots)

    def claim(self, slots: Slots) -> None:
        """The tree takes over slots that the caller has allocated for it, as a tree that is loaded needs."""
        numbers, _ = self.validate(slots)
        if len(np.unique(numbers)) != len(numbers):
            raise ValueError("A slot is named twice.")

    def check_invariants(self, adopted: Sequence[int], used: Sequence[int]) -> None:
        """Raises AssertionError if the tree owns a slot twice, or one that a request owns."""
        owned = set(adopted)
        assert len(adopted) == len(owned), f"the tree owns a slot twice: {sorted(adopted)}."
        both = owned & set(used)
        assert not both, f"the tree and a request both own {sorted(both)}."
