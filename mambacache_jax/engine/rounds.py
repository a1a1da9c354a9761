"""Decides what rounds of speculation compute. Prompts advance in ordinary steps, answers in rounds.

A round follows on what the one before accepted, so the host learns that first: rounds do not overlap.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from mambacache_jax.config import CacheConfig, EngineConfig, SpecConfig
from mambacache_jax.engine.scheduler import Scheduler
from mambacache_jax.host.chunking import num_blocks
from mambacache_jax.host.draft_tree import crossing
from mambacache_jax.host.drafts import HostDraft
from mambacache_jax.host.plan import Buckets, TableUpdate, row_sizes
from mambacache_jax.host.prefix_cache import PrefixCache
from mambacache_jax.host.round_plan import RoundRow, build_round_plan
from mambacache_jax.host.sequence import Sequence, Status
from mambacache_jax.layout import TABLE_BLOCK, RoundShape

_NONE = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class RoundStep:
    """One planned round: its packed plan and layout, and the rows' requests in plan order."""

    plan: np.ndarray
    shape: RoundShape
    sequences: tuple[Sequence, ...]


@dataclasses.dataclass
class RoundStats:
    """Counts since the start.

    Attributes:
      rounds: rounds, counted once for each row.
      tokens: tokens that they gave.
      accepted: how many of them accepted at least `i + 1` drafts, for each `i`.
    """

    rounds: int
    tokens: int
    accepted: list[int]


class SpeculativeScheduler(Scheduler):
    """A scheduler whose answers grow by rounds; see `Scheduler` for the rest.

    Attributes:
      rounds: what rounds came to.
    """

    def __init__(
        self,
        cache: PrefixCache,
        cache_config: CacheConfig,
        config: EngineConfig,
        buckets: Buckets,
        check_stamp: Callable[[int, int], None] | None,
        spec: SpecConfig,
        draft: HostDraft | None,
        lazy: bool,
    ) -> None:
        """As `Scheduler`.

        Args:
          cache: as there, and so are `cache_config`, `config` and `check_stamp`.
          buckets: of steps, without decode rows.
          spec: how to speculate.
          draft: proposes on the host; None where the device does.
          lazy: accepted tokens are folded in the next round, and not in their own (snapshots).
        """
        super().__init__(cache, cache_config, config, buckets, check_stamp)
        self._spec, self._draft, self._lazy = spec, draft, lazy
        self._interval = cache_config.track_interval
        self.rounds = RoundStats(0, 0, [0] * spec.steps)

    def shapes(self) -> list[RoundShape]:
        """Every shape that a round can have."""
        run = TABLE_BLOCK * self._page
        updates = num_blocks(self._config.max_context, run) + 2 * self._config.max_running
        return [RoundShape(rows, self._spec.num_nodes, updates) for rows in row_sizes(self._config)]

    def _sits_out(self, sequence: Sequence) -> bool:
        return True

    def schedule_round(self) -> RoundStep | None:
        """Plans a round of every request that is past its prompt; None if there is none.

        No step may be in flight.
        """
        left = self.shapes()[0].updates
        chosen: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING or not sequence.decoding:
                continue
            room = min(self._spec.depth, self._limit(sequence))
            if not self._reserve(sequence, sequence.kv_len + room, in_flight=False):
                continue
            waiting = sequence.num_updates(self._page)
            if waiting <= left:
                left -= waiting
                chosen.append(sequence)
        chosen = [sequence for sequence in chosen if sequence.status is Status.RUNNING]
        if not chosen:
            return None
        rows = [self._row(sequence) for sequence in chosen]
        updates: list[TableUpdate] = [u for sequence in chosen for u in sequence.take_updates(self._page)]
        shape = next(shape for shape in self.shapes() if shape.rows >= len(rows))
        return RoundStep(build_round_plan(rows, updates, shape), shape, tuple(chosen))

    def _limit(self, sequence: Sequence) -> int:
        return sequence.params.max_tokens - sequence.num_generated

    def _row(self, sequence: Sequence) -> RoundRow:
        limit = self._limit(sequence)
        speculates = sequence.params.speculate and limit > 1
        tokens, parent = _NONE, _NONE
        if self._draft is not None and speculates:
            known = sequence.buffer.array(0, len(sequence.buffer))
            tokens, parent = self._draft.propose(
                known, self._spec.num_nodes - 1, min(self._spec.steps, limit - 1)
            )
        return RoundRow(
            row=sequence.row,
            read=sequence.read_slot,
            write=sequence.working_slot,
            track=self._track(sequence),
            fresh=sequence.fresh,
            limit=limit,
            # A row's first round leaves the hidden vector that a draft model goes on from.
            drafts=speculates and not sequence.fresh,
            tokens=tokens,
            parent=parent,
            sampling=sequence.sampling,
        )

    def _track(self, sequence: Sequence) -> int:
        """The slot for the state at the track point that this round's fold reaches, or 0."""
        folded = sequence.kv_len - sequence.pending_len
        run = sequence.pending_len if self._lazy else self._spec.depth
        place = crossing(folded, run, self._interval)
        if not self._caching or not place or folded + place <= sequence.owned_from:
            return 0
        slot = sequence.track_slot or self._builder.export_slot(sequence)
        sequence.track_slot = slot
        if slot and self._lazy:
            sequence.track_position = folded + place
        return slot

    def complete_round(
        self,
        step: RoundStep,
        tokens: np.ndarray,
        length: np.ndarray,
        is_stop: Callable[[Sequence, int], bool],
    ) -> list[Sequence]:
        """Takes a round's runs, each up to its first stop.

        Args:
          step: enqueued and finished on the device.
          tokens: int32 `[row, depth]`.
          length: tokens of each run.
          is_stop: as in `complete`.

        Returns:
          The requests that finished.
        """
        finished = []
        for index, sequence in enumerate(step.sequences):
            run, before = tokens[index, : length[index]].tolist(), sequence.kv_len
            kept = 0
            for token in run:
                sequence.buffer.append(token)
                kept += 1
                if is_stop(sequence, token):
                    sequence.finish_reason = "stop"
                elif sequence.num_generated >= sequence.params.max_tokens:
                    sequence.finish_reason = "length"
                if sequence.finish_reason:
                    break
            sequence.kv_len, sequence.fresh = before + kept, False
            # What was accepted behind a stop is not counted, and only a state that has it already runs past.
            sequence.pending_len = kept if self._lazy else kept - len(run)
            if not self._lazy and sequence.track_slot:
                place = crossing(before, len(run), self._interval)
                sequence.track_position = before + place if place else sequence.track_position
                if sequence.track_position > sequence.kv_len:
                    sequence.track_position = 0
            self._count(kept, len(run))
            if sequence.finish_reason:
                self._leave(sequence, publish=True)
                sequence.status = Status.FINISHED
                finished.append(sequence)
        return finished

    def _count(self, kept: int, accepted: int) -> None:
        self.stats.generated_tokens += kept
        self.rounds.rounds += 1
        self.rounds.tokens += kept
        for place in range(accepted - 1):
            self.rounds.accepted[place] += 1
