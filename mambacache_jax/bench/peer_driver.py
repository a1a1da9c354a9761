"""Our cache as a benchmark harness of prefix caches drives it, beside the caches of other systems.

The harness times `match`, `indices`, `lock`, `unlock`, `insert` and `evict`; what an engine would hold
already, such as a request's tokens, is made untimed by the `to_` methods. Nothing is left out for it: slots
come from our own allocators and are checked at each insert, prefixes live in a namespace, checkpoints are
stamped from the request's token buffer, and statistics are counted. A harness that hands out made-up slot
numbers, as for timing one operation, gets slots of ours in their place.
"""

import numpy as np

from mambacache_jax.config import CacheConfig
from mambacache_jax.host import Inserted, Lease, Match, Namespace, PrefixCache, SlotAllocator, TokenBuffer
from mambacache_jax.host.allocator import Slots

NAMESPACE = Namespace(adapter="adapter", salt="tenant")


class CountingSlots(SlotAllocator):
    """An allocator that only counts, as the harness gives to every cache that it times.

    It hands out slots in turn, whoever has them still, so it cannot tell whose a slot is.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        """Counts from `num_slots`."""
        super().__init__(num_slots, page_size)
        self._next, self._left = 0, num_slots
        self._slots = np.arange(page_size, num_slots + page_size, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Slots not handed out, or come back."""
        return self._left

    def allocate(self, num_slots: int) -> np.ndarray:
        """The next slots."""
        if self._next + num_slots > len(self._slots):
            self._next = 0
        start, self._next = self._next, self._next + num_slots
        self._left -= num_slots
        return self._slots[start : self._next]

    def allocate_one(self) -> int:
        """The next slot."""
        return int(self.allocate(1)[0])

    def validate_one(self, slot: int) -> None:
        """Lets any slot pass."""

    def exchange(self, freed: np.ndarray, adopted: np.ndarray) -> None:
        """Counts what comes back."""
        self._left += len(freed)

    def free(self, slots: Slots) -> None:
        """Counts them."""
        self._left += len(slots)

    def free_adopted(self, slots: np.ndarray) -> None:
        """Counts them."""
        self._left += len(slots)

    def free_one(self, slot: int) -> None:
        """Counts it."""
        self._left += 1

    def adopt_one(self, slot: int) -> None:
        """Lets any slot pass."""


class PeerDriver:
    """The driver interface of the harness, in its own names.

    Attributes:
      name: what tables call it.
      match_returns_indices: a match carries its KV slots, so `indices` costs nothing more.
    """

    name = "mambacache-jax"
    match_returns_indices = True

    def __init__(self, checked: bool = True) -> None:
        """`checked` takes our own allocators, which know the owner of every slot; else slots are counted."""
        self._checked = checked

    def make_cache(self, kv_slots: int, ssm_slots: int, page_size: int) -> None:
        """Starts with an empty cache."""
        config = CacheConfig(
            kv_slots - kv_slots % page_size,
            ssm_slots,
            page_size,
            track_interval=page_size,
            checkpoint_interval=0,
        )
        if self._checked:
            self._cache = PrefixCache(config)
        else:
            counted = [CountingSlots(config.num_kv_slots, page_size)], [CountingSlots(ssm_slots, 1)]
            self._cache = PrefixCache(config, *counted)
        self._kv, self._ssm, self._page_size = self._cache.kv[0], self._cache.ssm[0], page_size
        self._serving = False
        self._lease: Lease | None = None

    def to_key(self, tokens: np.ndarray) -> TokenBuffer:
        """A request's tokens, as its buffer."""
        return TokenBuffer(tokens)

    def to_idx(self, indices: np.ndarray) -> np.ndarray:
        """KV slots by position; new ones of ours where the harness made them up."""
        return indices.astype(np.int32) if self._serving else self._kv.allocate(len(indices))

    def to_ssm(self, slot: int) -> int:
        """A state's slot; a new one of ours for a made-up one."""
        return slot if self._serving else self._ssm.allocate_one()

    def alloc_kv(self, count: int) -> np.ndarray | None:
        """KV slots for `count` tokens and the rest of their last page, or None."""
        self._serving = True
        pages = -(-count // self._page_size) * self._page_size
        return self._kv.allocate(pages) if pages <= self._kv.num_free else None

    def alloc_ssm(self) -> int:
        """A slot for a state."""
        self._serving = True
        return self._ssm.allocate_one()

    def free_ssm(self, slot: int) -> None:
        """Takes back a state's slot that the cache did not adopt."""
        self._cache.free_ssm([slot])

    def kv_avail(self) -> int:
        """Free KV slots."""
        return self._kv.num_free

    def ssm_avail(self) -> int:
        """Free SSM slots."""
        return self._ssm.num_free

    def match(self, key: TokenBuffer) -> tuple[int, Match]:
        """Usable tokens, and what was found."""
        match = self._cache.match(key, NAMESPACE)
        return match.prefix_len, match

    def indices(self, handle: Match, hit_len: int) -> np.ndarray:
        """KV slots of a match, which it has already."""
        return handle.kv_slots

    def insert(
        self, key: TokenBuffer, kv_indices: np.ndarray, ssm: int, prev_len: int = 0, want_handle: bool = False
    ) -> tuple[int, bool, Inserted]:
        """Tokens that were there, whether the state was adopted, and the node to lock."""
        inserted = self._cache.insert(
            key,
            kv_indices[prev_len:],
            ssm,
            namespace=NAMESPACE,
            stamp=key.stamp(len(key)),
            kv_start=None if self._serving else prev_len,
            lease=self._lease if self._serving else None,
        )
        return inserted.prefix_len, inserted.adopted, inserted

    def lock(self, handle: Match | Inserted) -> Lease:
        """A lease on KV and state."""
        self._lease = self._cache.lock(handle)
        return self._lease

    def unlock(self, ticket: Lease) -> None:
        """Gives a lease back."""
        self._cache.unlock(ticket)

    def evict(self, num_tokens: int = 0, num_ssm: int = 0) -> tuple[int, int]:
        """Slots freed of either kind."""
        return self._cache.evict(num_tokens, num_ssm)
