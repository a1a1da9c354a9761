"""Free slots of one pool, on the host.

Slots are handed out in pages: aligned runs of `page_size`. Page 0 is the null page, which padding writes and
nobody owns, so slot ids run from `page_size` to `num_slots + page_size - 1`. A slot is free, used by a
request, or adopted by the tree; a request cannot give away what the tree has adopted.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mambacache_jax.errors import OutOfSlots

FREE, USED, ADOPTED, NULL = range(4)

Slots = np.ndarray | Sequence[int]

Pages = tuple[np.ndarray, list[tuple[int, int]] | np.ndarray]
"""int32 page numbers; and the same as runs `[first, stop)`, or as intp, which is what NumPy indexes by."""

_INT32 = np.dtype(np.int32)
_MIN_RUNS, _MIN_RUN = 2048, 64
_ROWS = [bytes([state]) for state in (FREE, USED, ADOPTED, NULL)]


class SlotAllocator:
    """A stack of free pages: what was freed last is handed out first, so that a trace replays exactly.

    Arrays that it returns are copies; it never keeps a view of one that it was given.
    """

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        """Makes an allocator with every page free.

        Args:
          num_slots: usable slots, a positive multiple of `page_size`; the null page comes on top.
          page_size: slots a page.
        """
        if page_size < 1 or num_slots < page_size or num_slots % page_size:
            raise ValueError(
                f"num_slots must be a positive multiple of page_size, got {num_slots} and {page_size}."
            )
        num_pages = num_slots // page_size
        self._num_slots, self._page_size = num_slots, page_size
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._number_bytes = np.arange(num_pages + 1, dtype=np.int32).tobytes()
        self._top = num_pages
        self._state = bytearray(num_pages + 1)
        self._state[0] = NULL
        self._states = np.frombuffer(self._state, np.uint8)
        self._offsets = np.arange(page_size, dtype=np.int32)
        self._seen = np.zeros(num_pages + 1, np.int32)

    @property
    def num_slots(self) -> int:
        """Usable slots, free or not."""
        return self._num_slots

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self._page_size

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return self._top * self._page_size

    @property
    def num_used(self) -> int:
        """Slots that a request or the tree owns."""
        return self._num_slots - self._top * self._page_size

    def allocate(self, num_slots: int) -> np.ndarray:
        """Takes `num_slots` slots, a multiple of the page size, in ascending order.

        Raises:
          OutOfSlots: too few are free; nothing was changed.
        """
        page_size, top = self._page_size, self._top
        count, rest = divmod(num_slots, page_size)
        if rest or count < 0:
            raise ValueError(f"Slots are handed out in pages of {page_size}, {num_slots} were asked for.")
        if count > top:
            raise OutOfSlots(
                f"{num_slots} slots needed, {self.num_free} free of {self._num_slots}. "
                f"Free or evict some first, or make the pool larger."
            )
        if count == 1 and page_size == 1:
            return np.array([self.allocate_one()], np.int32)
        # Slots in order read as few runs, and are quick to check.
        pages = np.sort(self._stack[top - count : top])
        self._top = top - count
        self._states[pages.astype(np.intp)] = USED
        return pages if page_size == 1 else (pages[:, None] * page_size + self._offsets).ravel()

    def allocate_one(self) -> int:
        """Takes one slot; only where a page is one slot.

        Raises:
          OutOfSlots: none is free.
        """
        if self._page_size != 1 or not self._top:
            return int(self.allocate(1)[0])
        self._top -= 1
        slot = int(self._stack[self._top])
        self._state[slot] = USED
        return slot

    def free(self, slots: Slots) -> None:
        """Takes back slots that a request owns, whole pages.

        Raises:
          ValueError: a slot is null, out of range, free, the tree's, named twice, or not in a whole page. The
            message names it, and nothing was changed.
        """
        if len(slots) == 1 and self._page_size == 1:
            slot = int(self.as_int32(slots)[0])
            self.validate_one(slot)
            self.free_one(slot)
        else:
            self.free_pages(self.validate(slots))

    def validate(self, slots: Slots) -> Pages:
        """The pages of `slots`, all owned by requests and distinct; raises as `free` does."""
        return self._pages_in_state(self.as_int32(slots), USED)

    def validate_one(self, slot: int) -> None:
        """`validate` for one slot, where a page is one slot."""
        if not 0 <= slot < len(self._state):
            raise ValueError(self._out_of_range(slot))
        if self._state[slot] != USED:
            raise ValueError(self._wrong_state(slot, self._state[slot]))

    def free_pages(self, pages: Pages) -> None:
        """Frees pages that `validate` returned."""
        self._set(pages, FREE)
        top = self._top + len(pages[0])
        self._stack[self._top : top] = pages[0]
        self._top = top

    def exchange(self, freed: np.ndarray, adopted: np.ndarray) -> None:
        """Takes back some of a request's own slots and lets the tree take over others; int32, whole pages.

        Raises:
          ValueError: as `free`, with nothing changed.
        """
        if len(freed):
            self.validate(np.concatenate([freed, adopted]))
            self.free_pages(self.validate(freed))
            self._set(self.validate(adopted), ADOPTED)
        elif len(adopted):
            self._set(self.validate(adopted), ADOPTED)

    def adopt_one(self, slot: int) -> None:
        """The tree takes over a slot that `validate_one` accepted."""
        self._state[slot] = ADOPTED

    def free_adopted(self, slots: np.ndarray) -> None:
        """The tree gives back slots that it adopted, whole pages."""
        numbers = slots if self._page_size == 1 else slots[:: self._page_size] // self._page_size
        self.free_pages(self._pages(numbers))

    def free_every_adopted(self, adopted: Callable[[], np.ndarray]) -> None:
        """The tree gives back all that it adopted, at a cost that depends on the pool's size alone.

        Args:
          adopted: would say which slots those are; nobody has to ask here.
        """
        pages = np.flatnonzero(self._states == ADOPTED)
        if len(pages):
            self.free_pages((pages.astype(np.int32), pages))

    def claim(self, slots: Slots) -> None:
        """The tree takes over these very slots, whole free pages, as a tree that is loaded needs them.

        Raises:
          ValueError: a slot is not free, or named twice. Nothing was changed.
        """
        self._set(self._pages_in_state(self.as_int32(slots), FREE), ADOPTED)
        free = np.flatnonzero(self._states == FREE)[::-1]
        self._top = len(free)
        self._stack[: self._top] = free

    def free_one(self, slot: int) -> None:
        """Frees a slot that `validate_one` accepted, or that the tree adopted; where a page is one slot."""
        self._state[slot] = FREE
        self._stack[self._top] = slot
        self._top += 1

    def check_invariants(self, adopted: Sequence[int], used: Sequence[int]) -> None:
        """Raises AssertionError unless each slot is free, the tree's or a request's, and just one of these.

        Args:
          adopted: every slot that the tree owns.
          used: every slot that a request owns.
        """
        stack = sorted(self._stack[: self._top].tolist())
        free = np.flatnonzero(self._states == FREE).tolist()
        assert stack == free, f"the stack holds pages {stack}, but {free} are free."
        assert self._state[0] == NULL, "the null page has been given away."
        for owner, slots, state in (("the tree", adopted, ADOPTED), ("requests", used, USED)):
            owned, pages = set(slots), np.flatnonzero(self._states == state)
            assert len(slots) == len(owned), f"{owner} own a slot twice: {sorted(slots)}."
            known = set((pages[:, None] * self._page_size + self._offsets).ravel().tolist())
            assert owned == known, (
                f"{owner} own {sorted(owned - known)} without the allocator's knowledge, "
                f"and have lost {sorted(known - owned)}."
            )

    def as_int32(self, slots: Slots) -> np.ndarray:
        """`slots` as a one-dimensional int32 array, perhaps the same; ValueError if they are no slot ids."""
        array = np.asarray(slots)
        if array.ndim != 1:
            raise ValueError(f"Slots must be one-dimensional, got shape {array.shape}.")
        if array.dtype is _INT32:
            return array
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"Slots must be integers, got {array.dtype}.")
        outside = (array < 0) | (array >= self._num_slots + self._page_size)
        if outside.any():
            raise ValueError(self._out_of_range(array[outside][0]))
        return array.astype(np.int32)

    def _whole_pages(self, slots: np.ndarray) -> np.ndarray:
        page_size = self._page_size
        if len(slots) % page_size:
            raise ValueError(f"{len(slots)} slots are no whole pages of {page_size}.")
        runs = slots.reshape(-1, page_size)
        pages = runs[:, 0] // page_size
        broken = (runs != pages[:, None] * page_size + self._offsets).any(axis=1)
        if broken.any():
            run = runs[int(broken.argmax())].tolist()
            raise ValueError(f"Slots {run} are no whole page of {page_size}.")
        return pages

    def _pages_in_state(self, slots: np.ndarray, state: int) -> Pages:
        """The pages of `slots`, which must all be in this state and distinct."""
        numbers = slots if self._page_size == 1 else self._whole_pages(slots)
        pages = self._pages(numbers)
        where, in_state = pages[1], True
        if isinstance(where, list):
            # Runs that ascend are distinct.
            end, row, states = 0, _ROWS[state], self._state
            for first, stop in where:
                if first < end or not states.startswith(row * (stop - first), first):
                    in_state = False
                    break
                end = stop
        else:
            try:
                in_state = self._states[where].tobytes() == _ROWS[state] * len(where)
            except IndexError:
                in_state = False
            # Pages that ascend from a positive one are distinct, and none counts from the end.
            in_state = in_state and numbers[0] > 0 and b"\0" not in (numbers[1:] > numbers[:-1]).tobytes()
        if not in_state:
            self._check_each(slots, numbers.astype(np.intp), state)
        return pages

    def _pages(self, numbers: np.ndarray) -> Pages:
        """Page numbers, and as runs if they are few, for bytes of a run are set and compared at once."""
        count = len(numbers)
        if not count:
            return numbers, []
        first, last = int(numbers[0]), int(numbers[-1])
        if (
            last - first == count - 1
            and first > 0
            and self._number_bytes.startswith(numbers.tobytes(), first * numbers.itemsize)
        ):
            return numbers, [(first, last + 1)]
        if count >= _MIN_RUNS:
            breaks = np.flatnonzero(numbers[1:] - numbers[:-1] != 1)
            if len(breaks) * _MIN_RUN < count:
                firsts = numbers[np.concatenate([[0], breaks + 1])].tolist()
                stops = (numbers[np.concatenate([breaks, [count - 1]])] + 1).tolist()
                if min(firsts) > 0:
                    return numbers, list(zip(firsts, stops, strict=True))
        return numbers, numbers.astype(np.intp)

    def _set(self, pages: Pages, state: int) -> None:
        where = pages[1]
        if isinstance(where, list):
            row, states = _ROWS[state], self._state
            for first, stop in where:
                states[first:stop] = row * (stop - first)
        else:
            self._states[where] = state

    def _check_each(self, slots: np.ndarray, index: np.ndarray, state: int) -> None:
        """Names the slot that is out of range, in another state, or named twice, if there is one."""
        outside = (index < 0) | (index >= len(self._states))
        if np.count_nonzero(outside):
            raise ValueError(self._out_of_range(slots[int(outside.argmax()) * self._page_size]))
        wrong = self._states[index] != state
        if np.count_nonzero(wrong):
            at = int(wrong.argmax())
            raise ValueError(self._wrong_state(int(slots[at * self._page_size]), self._state[index[at]]))
        order = np.arange(len(index), dtype=np.int32)
        self._seen[index] = order
        again = self._seen[index] != order
        if np.count_nonzero(again):
            raise ValueError(f"Slot {slots[int(again.argmax()) * self._page_size]} is named twice.")

    def _out_of_range(self, slot: int) -> str:
        last = self._num_slots + self._page_size - 1
        return f"Slot {slot} is out of range: slots are {self._page_size} to {last}."

    def _wrong_state(self, slot: int, state: int) -> str:
        reason = {
            FREE: "is free; only a request's own slots can be given away",
            USED: "is in use; a loaded tree needs it free",
            ADOPTED: "belongs to the tree; only a request's own slots can be given away",
            NULL: "is a null slot, which nobody owns",
        }
        return f"Slot {slot} {reason[state]}."
