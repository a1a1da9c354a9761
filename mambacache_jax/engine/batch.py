"""One step: what may still go into it, how chosen requests become its rows, and what steps add up to."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from mambacache_jax.config import CacheConfig, EngineConfig
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host.chunking import export_positions, num_blocks
from mambacache_jax.host.plan import Buckets, DecodeRow, ExtendRow, TableUpdate, build_plan
from mambacache_jax.host.prefix_cache import PrefixCache
from mambacache_jax.host.sequence import Sequence
from mambacache_jax.layout import FROM_DEVICE, TABLE_BLOCK, PlanShape


@dataclasses.dataclass(frozen=True)
class Step:
    """One planned step.

    Attributes:
      plan: the packed plan.
      shape: its layout.
      decode: the decode rows' requests, in plan order.
      extend: the extend rows' requests, in plan order, each with its plan row.
      sampled: (index among the step's sampled positions, request) for each token to come.
      all_logits: some request wants the logits of every position.
    """

    plan: np.ndarray
    shape: PlanShape
    decode: tuple[Sequence, ...]
    extend: tuple[tuple[Sequence, ExtendRow], ...]
    sampled: tuple[tuple[int, Sequence], ...]
    all_logits: bool


@dataclasses.dataclass
class SchedulerStats:
    """Counts since the start.

    Attributes:
      prompt_tokens: tokens of admitted prompts.
      cached_tokens: of those, taken from the cache at admission.
      computed_tokens: prompt positions computed, recomputation included.
      generated_tokens: tokens sampled and kept.
      preemptions: requests sent back for lack of slots.
      waits: schedules that a request spent waiting for a shared prefix.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    waits: int = 0


class StepBudget:
    """What is left of a step: blocks, rows and table updates; and who has been given some of it.

    Attributes:
      chosen: requests and how many tokens each computes, in order of arrival.
    """

    def __init__(self, config: EngineConfig, buckets: Buckets) -> None:
        self._block_tokens, self._deterministic = config.block_tokens, config.deterministic
        self._blocks, self._extend_rows = buckets.blocks[-1], buckets.extend_rows
        self._updates = buckets.updates
        self.chosen: list[tuple[Sequence, int]] = []

    def room_for_row(self) -> bool:
        """Whether one more row of prompt tokens fits."""
        return self._blocks > 0 and self._extend_rows > 0

    def tokens_for(self, sequence: Sequence, page_size: int) -> int:
        """Tokens that a running request may compute in this step."""
        waiting = sequence.num_updates(page_size)
        if sequence.decoding and not self._deterministic:
            # The page that it may open can lie in one run more.
            return int(waiting < self._updates)
        left = 1 if sequence.decoding else sequence.target - sequence.kv_len
        return min(left, self._room(page_size, waiting))

    def first_tokens(self, prefix_len: int, left: int, page_size: int) -> int:
        """Tokens that a request may compute in its first step, whose prefix goes into the table as well."""
        return min(left, self._room(page_size, num_blocks(prefix_len, TABLE_BLOCK * page_size)))

    def _room(self, page_size: int, updates: int) -> int:
        """Tokens that blocks and table updates have room for, beside `updates`."""
        if not self.room_for_row():
            return 0
        # Tokens that start in the middle of a run touch one run more.
        runs = self._updates - updates - 1
        return max(0, min(self._blocks * self._block_tokens, runs * TABLE_BLOCK * page_size))

    def take(self, sequence: Sequence, count: int, page_size: int) -> None:
        """Gives a request its tokens of this step; its pages are reserved already."""
        self.chosen.append((sequence, count))
        self._updates -= sequence.num_updates(page_size)
        if not sequence.decoding or self._deterministic:
            self._blocks -= num_blocks(count, self._block_tokens)
            self._extend_rows -= 1


class StepBuilder:
    """Turns chosen requests into a step: their rows, their checkpoints, and the packed plan."""

    def __init__(
        self,
        cache: PrefixCache,
        cache_config: CacheConfig,
        config: EngineConfig,
        buckets: Buckets,
        stats: SchedulerStats,
    ) -> None:
        """`stats` is the scheduler's own; what is computed and skipped is counted there."""
        self._cache, self._config, self._buckets, self._stats = cache, config, buckets, stats
        self._page, self._caching = cache_config.page_size, cache_config.prefix_caching
        self._track_interval = cache_config.track_interval
        self._checkpoint_interval = cache_config.checkpoint_interval

    def export_slot(self, sequence: Sequence) -> int:
        """A slot for a checkpoint, or 0: a checkpoint is optional, so having no slot is only counted."""
        try:
            return int(self._cache.allocate_ssm(1)[0])
        except OutOfSlots:
            self._cache.count_skipped("no_slot", namespace=sequence.namespace)
            return 0

    def build(self, chosen: Iterable[tuple[Sequence, int]]) -> Step:
        """Plans the chosen requests' tokens and counts them as computed."""
        decode: list[tuple[Sequence, DecodeRow]] = []
        extend: list[tuple[Sequence, ExtendRow]] = []
        updates: list[TableUpdate] = []
        for sequence, count in chosen:
            if sequence.decoding and not self._config.deterministic:
                page = sequence.take_opened_page(self._page)
                if page is None:
                    updates.extend(sequence.take_updates(self._page))
                decode.append((sequence, self._decode_row(sequence, page or 0)))
            else:
                updates.extend(sequence.take_updates(self._page))
                extend.append((sequence, self._extend_row(sequence, count)))
        blocks = sum(num_blocks(len(row.tokens), self._config.block_tokens) for _, row in extend)
        shape = self._buckets.shape(len(decode), blocks, len(updates))
        plan = build_plan([row for _, row in decode], [row for _, row in extend], updates, shape)
        sampled = [(i, sequence) for i, (sequence, _) in enumerate(decode)]
        sampled += [(shape.decode_rows + i, seq) for i, (seq, row) in enumerate(extend) if row.samples]
        for _, sequence in sampled:
            sequence.in_flight += 1
        return Step(
            plan=plan,
            shape=shape,
            decode=tuple(sequence for sequence, _ in decode),
            extend=tuple(extend),
            sampled=tuple(sampled),
            all_logits=any(sequence.keep_logits for sequence, _ in extend),
        )

    def _decode_row(self, sequence: Sequence, page: int) -> DecodeRow:
        read, write = self._rotate(sequence)
        row = DecodeRow(sequence.row, sequence.kv_len, page, read, write, sequence.sampling)
        sequence.kv_len += 1
        return row

    def _rotate(self, sequence: Sequence) -> tuple[int, int]:
        """Read and write slot of a decode step, tracking the state before it if it is at a track point.

        Tracking moves no data: the state at the track point stays where it is and the step writes the
        other slot, which held the track before. The two slots take turns, so no step in flight writes the
        state that the tree may adopt.
        """
        read, position = sequence.working_slot, sequence.kv_len
        due = self._caching and position % self._track_interval == 0 and position > sequence.owned_from
        if due and position > sequence.track_position:
            spare = sequence.track_slot or self.export_slot(sequence)
            if spare:
                sequence.track_slot, sequence.track_position = read, position
                sequence.working_slot = sequence.read_slot = spare
        return read, sequence.working_slot

    def _extend_row(self, sequence: Sequence, count: int) -> ExtendRow:
        start, end = sequence.kv_len, sequence.kv_len + count
        exports: list[tuple[int, int]] = []
        if sequence.decoding:
            tokens = np.array([FROM_DEVICE], np.int32)
            read, write = self._rotate(sequence)
        else:
            tokens = sequence.buffer.array(start, end)
            read, write = sequence.read_slot, sequence.working_slot
            exports = self._exports(sequence, start, end)
            sequence.computed_tokens += count
            self._stats.computed_tokens += count
        sequence.kv_len = end
        samples = end >= sequence.target
        return ExtendRow(sequence.row, start, tokens, read, write, tuple(exports), samples, sequence.sampling)

    def _exports(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        if not self._caching:
            return []
        positions, dropped = export_positions(
            start,
            end,
            branches=sequence.branches,
            prompt_len=sequence.prompt_len,
            interval=self._checkpoint_interval,
            page_size=self._page,
        )
        if dropped:
            self._cache.count_skipped("limit", dropped, namespace=sequence.namespace)
        slots = [(position, self.export_slot(sequence)) for position in positions]
        return [(position, slot) for position, slot in slots if slot]
