"""Free slots that someone else keeps: the allocators of a serving stack, under a tree of ours."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mambacache_jax.host.allocator import ADOPTED, FREE, Pages, SlotAllocator, Slots


class CallerAllocator(Protocol):
    """What the tree needs of an allocator that it does not own.

    Slots are numbered as `SlotAllocator` does: page 0 is the null page.
    """

    @property
    def num_free(self) -> int:
        """Slots that `allocate` could hand out now; the tree evicts no more than this lacks.

        Where `allocate` refuses as many all the same, what was evicted first stays evicted.
        """
        ...

    def allocate(self, num_slots: int) -> np.ndarray:
        """Takes slots, whole pages; an int32 array. Raises `OutOfSlots` with nothing changed."""
        ...

    def free(self, slots: np.ndarray) -> None:
        """Takes back what `allocate` handed out, whole pages, or raises with nothing changed.

        Slots of the tree that are refused are offered again before the next `allocate` or `free`; what that
        raises is raised then. An eviction or an insert itself is never stopped by it.
        """
        ...


class BorrowedSlots(SlotAllocator):
    """A caller's allocator, and beside it what the tree has adopted.

    The caller may allocate and free without the tree's knowledge, so of slots that are not the tree's nothing
    is known here: what is refused is a slot that the tree has already, one named twice, or no slot at all.
    """

    def __init__(self, caller: CallerAllocator, num_slots: int, page_size: int = 1) -> None:
        """Wraps a caller's allocator over slots `page_size` to `num_slots + page_size - 1`."""
        super().__init__(num_slots, page_size)
        self._caller = caller
        self._owed: list[np.ndarray] = []

    @property
    def num_free(self) -> int:
        """Slots that nobody owns: by the caller's count, and those that it has refused to take back."""
        return self._caller.num_free + sum(map(len, self._owed))

    @property
    def num_used(self) -> int:
        """Slots that a request or the tree owns."""
        return self.num_slots - self.num_free

    def allocate(self, num_slots: int) -> np.ndarray:
        """Takes slots from the caller's allocator, which may raise `OutOfSlots`."""
        self._give_back()
        return self._caller.allocate(num_slots)

    def allocate_one(self) -> int:
        """Takes one slot from the caller's allocator, which may raise `OutOfSlots`."""
        return int(self.allocate(1)[0])

    def free(self, slots: Slots) -> None:
        """Gives slots that a request owns back to the caller's allocator, or raises with nothing changed."""
        self.validate(slots)
        self._give_back()
        self._caller.free(self.as_int32(slots))

    def validate(self, slots: Slots) -> Pages:
        """The pages of `slots`, distinct and none of them the tree's."""
        return self._pages_in_state(self.as_int32(slots), FREE)

    def validate_one(self, slot: int) -> None:
        """`validate` for one slot, where a page is one slot."""
        self.validate([slot])

    def exchange(self, freed: np.ndarray, adopted: np.ndarray) -> None:
        """Gives slots back to the caller's allocator; the tree takes over others."""
        self.validate(np.concatenate([freed, adopted]) if len(freed) else adopted)
        self._set(self.validate(adopted), ADOPTED)
        if len(freed):
            self.free_adopted(freed)

    def free_adopted(self, slots: np.ndarray) -> None:
        """Gives slots back to the caller's allocator, at once or as soon as it takes them."""
        numbers = slots if self.page_size == 1 else slots[:: self.page_size] // self.page_size
        self._set(self._pages(numbers), FREE)
        self._owed.append(slots)
        # Whatever the caller's code raises comes too late here: the tree is without these slots already.
        with contextlib.suppress(Exception):
            self._give_back()

    def free_one(self, slot: int) -> None:
        """`free_adopted` for one slot."""
        self.free_adopted(np.array([slot], np.int32))

    def free_every_adopted(self, adopted: Callable[[], np.ndarray]) -> None:
        """`free_adopted` for all that the tree adopted."""
        if len(slots := adopted()):
            self.free_adopted(slots)

    def claim(self, slots: Slots) -> None:
        """The tree takes over slots that the caller has allocated for it, as a tree that is loaded needs."""
        self._set(self.validate(slots), ADOPTED)

    def check_invariants(self, adopted: Sequence[int], used: Sequence[int]) -> None:
        """Raises AssertionError unless the tree owns what it adopted, and nothing that a request owns."""
        owned = set(adopted)
        assert len(adopted) == len(owned), f"the tree owns a slot twice: {sorted(adopted)}."
        pages = np.flatnonzero(self._states == ADOPTED)
        known = set((pages[:, None] * self.page_size + self._offsets).ravel().tolist())
        assert owned == known, f"the tree owns {sorted(owned)}, and adopted {sorted(known)}."
        both = owned & set(used)
        assert not both, f"the tree and a request both own {sorted(both)}."

    def _give_back(self) -> None:
        while self._owed:
            self._caller.free(self._owed[0])
            del self._owed[0]
