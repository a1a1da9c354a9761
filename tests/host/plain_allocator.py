"""An allocator such as a serving stack brings along: a list of free pages, and at times it refuses."""

import numpy as np

from mambacache_jax.errors import OutOfSlots


class Refused(RuntimeError):
    """It would not take slots back."""


class PlainAllocator:
    """Free pages in a list, first in, first out.

    Attributes:
      refuse_at: of the calls from now on, the one that is refused, counted from 0; None for none.
      refused: whether a call has been refused since this was set to False.
    """

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        self.page_size = page_size
        self.pages = list(range(1, num_slots // page_size + 1))
        self.refuse_at: int | None = None
        self.refused = False

    @property
    def num_free(self) -> int:
        return len(self.pages) * self.page_size

    def allocate(self, num_slots: int) -> np.ndarray:
        count = num_slots // self.page_size
        if self._refuses() or count > len(self.pages):
            raise OutOfSlots(f"{num_slots} slots are refused.")
        taken, self.pages = self.pages[:count], self.pages[count:]
        return self._slots(taken)

    def free(self, slots: np.ndarray) -> None:
        if self._refuses():
            raise Refused(f"{slots} are not taken back.")
        assert slots.dtype == np.int32
        pages = (slots[:: self.page_size] // self.page_size).tolist()
        assert slots.tolist() == self._slots(pages).tolist()
        assert not set(pages) & set(self.pages)
        self.pages += pages

    def take(self, slots: np.ndarray) -> None:
        """Allocates these very slots, as for a tree that is about to be loaded."""
        for page in (slots[:: self.page_size] // self.page_size).tolist():
            self.pages.remove(page)

    def _refuses(self) -> bool:
        if self.refuse_at is None:
            return False
        self.refuse_at -= 1
        if self.refuse_at >= 0:
            return False
        self.refuse_at, self.refused = None, True
        return True

    def _slots(self, pages: list[int]) -> np.ndarray:
        first = np.array(pages, np.int32)[:, None] * self.page_size
        return (first + np.arange(self.page_size, dtype=np.int32)).ravel()
