"""A request in flight: its tokens, the slots it owns, and how far it has come."""

import dataclasses
import enum

import numpy as np

from mambacache_jax.config import SamplingParams
from mambacache_jax.host.chunking import num_pages
from mambacache_jax.host.key import TokenBuffer
from mambacache_jax.host.namespace import AnyNamespace
from mambacache_jax.host.plan import TableUpdate, pack_sampling
from mambacache_jax.host.results import Lease
from mambacache_jax.layout import TABLE_BLOCK


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Sequence:
    """One request, from submission to its last token. Positions count enqueued work, not finished work.

    Attributes:
      request_id: also the order of arrival.
      buffer: prompt, then each token as the host learns it.
      prompt_len: tokens of the prompt.
      params: how tokens are chosen.
      namespace: see `PrefixCache.match`.
      reuse_limit: most positions to take from the cache.
      keep_logits: every computed position's logits are wanted.
      row: request-table row; 0 while not running.
      kv_len: tokens whose KV and state have been enqueued; the working state is the state there.
      target: prefill ends here: the tokens known when the request was admitted.
      owned_from: positions below are the tree's, under `lease`; those from here on are this request's.
      read_slot: what the next step reads: the leased checkpoint at first, then `working_slot`; 0 is zero.
      working_slot: the state that the request advances; 0 while not running.
      track_slot: the newest state exported during decode, at `track_position`; 0 for none.
      pending_len: of `kv_len`, tokens that wait to be folded into the working state; negative where that has
        run past a stop.
      fresh: what its request-table row has pending on the device is another request's.
      in_flight: sampled tokens that the device has and the host has not.
      branches: positions where others want a checkpoint.
      waited: schedules spent waiting for another request to publish a shared prefix.
      cached_tokens: positions taken from the cache at the first admission.
      computed_tokens: positions computed in prefill, recomputation after a preemption included.
    """

    request_id: int
    buffer: TokenBuffer
    prompt_len: int
    params: SamplingParams
    namespace: AnyNamespace = None
    reuse_limit: int | None = None
    keep_logits: bool = False
    status: Status = Status.WAITING
    row: int = 0
    kv_len: int = 0
    target: int = 0
    owned_from: int = 0
    lease: Lease | None = None
    read_slot: int = 0
    working_slot: int = 0
    track_slot: int = 0
    track_position: int = 0
    pending_len: int = 0
    fresh: bool = True
    in_flight: int = 0
    branches: tuple[int, ...] = ()
    waited: int = 0
    cached_tokens: int | None = None
    computed_tokens: int = 0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        p = self.params
        self.sampling = pack_sampling(p.temperature, p.top_p, p.min_p, p.top_k, p.seed)
        # Grows by doubling, so that a token a step costs no copy of the history.
        self._kv_store = np.zeros(0, np.int32)
        self._kv_count = 0
        self._pending: list[tuple[int, int]] = []

    @property
    def num_generated(self) -> int:
        """Tokens generated that the host knows."""
        return len(self.buffer) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether the next step feeds the token sampled last."""
        return self.status is Status.RUNNING and self.kv_len >= self.target

    @property
    def fully_scheduled(self) -> bool:
        """Whether the last token that the limit allows is already being sampled."""
        return self.num_generated + self.in_flight >= self.params.max_tokens

    @property
    def kv_slots(self) -> np.ndarray:
        """int32 KV slot by position; a view, valid until the next change."""
        return self._kv_store[: self._kv_count]

    @property
    def owned_kv(self) -> np.ndarray:
        """int32 KV slots that this request owns, whole pages."""
        return self._kv_store[self.owned_from : self._kv_count]

    @property
    def owned_ssm(self) -> list[int]:
        """SSM slots that this request owns."""
        return [slot for slot in (self.working_slot, self.track_slot) if slot]

    def ask_branch(self, position: int) -> None:
        """Others want a checkpoint at `position`."""
        if position not in self.branches:
            self.branches = (*self.branches, position)

    def append_kv(self, slots: np.ndarray) -> None:
        """Takes over KV slots, whole pages, for the positions after those it has."""
        start, end = self._kv_count, self._kv_count + len(slots)
        if end > len(self._kv_store):
            grown = np.zeros(max(end, 2 * len(self._kv_store)), np.int32)
            grown[:start] = self._kv_store[:start]
            self._kv_store = grown
        self._kv_store[start:end] = slots
        self._kv_count = end
        self._pending.append((start, end))

    def replace_kv(self, start: int, slots: np.ndarray) -> None:
        """The positions from `start` on now lie in `slots`, the tree's own."""
        end = start + len(slots)
        if not np.array_equal(self._kv_store[start:end], slots):
            self._kv_store[start:end] = slots
            self._pending.append((start, end))

    def clear_kv(self) -> None:
        """Forgets all KV slots; whoever owned them has them already."""
        self._kv_count = 0
        self._pending = []

    def pages_missing(self, length: int, page_size: int) -> int:
        """Pages to allocate before `length` tokens fit."""
        return num_pages(length, page_size) - self._kv_count // page_size

    def num_updates(self, page_size: int) -> int:
        """Table updates that would tell the device of all it has not been told."""
        return len(self._changed_blocks(page_size))

    def take_opened_page(self, page_size: int) -> int | None:
        """The one page that position `kv_len` opens, if that is all the device must be told, once.

        0 if there is nothing to tell; None if there is more, which `take_updates` gives.
        """
        if not self._pending:
            return 0
        if self._pending != [(self.kv_len, self.kv_len + page_size)]:
            return None
        self._pending = []
        return int(self._kv_store[self.kv_len]) // page_size

    def take_updates(self, page_size: int) -> list[TableUpdate]:
        """What the device must be told of the request's pages, once."""
        blocks, self._pending = self._changed_blocks(page_size), []
        span = TABLE_BLOCK * page_size
        return [
            TableUpdate(
                self.row, block, self.kv_slots[block * span : (block + 1) * span : page_size] // page_size
            )
            for block in blocks
        ]

    def _changed_blocks(self, page_size: int) -> list[int]:
        """The aligned runs of the table row that hold a change, ascending."""
        if not self._pending:
            return []
        span = TABLE_BLOCK * page_size
        return sorted({b for start, end in self._pending for b in range(start // span, -(-end // span))})
