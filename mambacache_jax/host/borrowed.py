"""Free slots that someone else keeps: the allocators of a serving stack, under a tree of ours."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mambacache_jax.host.allocator import ADOPTED, FREE, SlotAllocator, Slots


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
    """A caller's allocator, and beside it what the tree has adopted.

    The caller may allocate and free without the tree's knowledge, so of slots that are not the tree's nothing
    is known here: what is refused is a slot that the tree has already, or no slot at all.
    """

    def __init__(self, caller: CallerAllocator, num_slots: int, page_size: int = 1) -> None:
        """Wraps a caller's allocator over slots `page_size` to `num_slots + page_size - 1`."""
        super().__init__(num_slots, page_size)
        self._caller = caller
        self._top = 0

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

    def validate(self, slots: Slots) -> np.ndarray:
        """The pages of `slots` as an index, distinct and none of them the tree's."""
        return self._pages_in_state(self.as_int32(slots), FREE)

    def validate_one(self, slot: int) -> None:
        """`validate` for one slot, where a page is one slot."""
        self.validate([slot])

    def free_pages(self, pages: np.ndarray) -> None:
        """Gives pages back to the caller's allocator."""
        slots = pages.astype(np.int32)
        if self.page_size > 1:
            slots = (slots[:, None] * self.page_size + self._offsets).ravel()
        self._caller.free(slots)
        self._states[pages] = FREE

    def free_one(self, slot: int) -> None:
        """Gives one slot back to the caller's allocator."""
        self.free_pages(np.array([slot], np.intp))

    def claim(self, slots: Slots) -> None:
        """The tree takes over slots that the caller has allocated for it, as a tree that is loaded needs."""
        self.adopt_pages(self.validate(slots))

    def check_invariants(self, adopted: Sequence[int], used: Sequence[int]) -> None:
        """Raises AssertionError unless the tree owns what it adopted, and nothing that a request owns."""
        owned = set(adopted)
        assert len(adopted) == len(owned), f"the tree owns a slot twice: {sorted(adopted)}."
        pages = np.flatnonzero(self._states == ADOPTED)
        known = set((pages[:, None] * self.page_size + self._offsets).ravel().tolist())
        assert owned == known, f"the tree owns {sorted(owned)}, and adopted {sorted(known)}."
        both = owned & set(used)
        assert not both, f"the tree and a request both own {sorted(both)}."
