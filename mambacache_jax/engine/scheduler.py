"""Decides what each step computes: admission, chunks, decode, tracking, publishing, preemption.

Pure host code: it drives the prefix cache and makes plans, and never touches the device. A step is

    step = scheduler.schedule()     reserves slots and builds the plan
    ... the plan is enqueued ...
    scheduler.enqueued(step)        publishes what the step will have written
    scheduler.complete(step, ...)   takes the sampled tokens, one step later

Order is first come first served. Work on the device happens in the order it is enqueued, so a slot may be
given away as soon as the step that last used it has been enqueued.
"""

import collections
import itertools
from collections.abc import Callable

import numpy as np

from mambacache_jax.config import CacheConfig, EngineConfig
from mambacache_jax.engine.batch import SchedulerStats, Step, StepBudget, StepBuilder
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host.chunking import num_pages, page_floor
from mambacache_jax.host.plan import Buckets
from mambacache_jax.host.prefix_cache import PrefixCache
from mambacache_jax.host.sequence import Sequence, Status


class Scheduler:
    """Requests waiting and running, and the steps that move them on.

    Attributes:
      running: admitted requests, in order of arrival.
      waiting: requests not admitted, in order of arrival.
      stats: counts since the start.
    """

    def __init__(
        self,
        cache: PrefixCache,
        cache_config: CacheConfig,
        config: EngineConfig,
        buckets: Buckets,
        check_stamp: Callable[[int, int], None] | None = None,
    ) -> None:
        """Makes an idle scheduler.

        Args:
          cache: the host cache, used by this scheduler alone.
          cache_config: its sizes and rules.
          config: batching.
          buckets: shapes of plans; in deterministic mode without decode rows.
          check_stamp: called with (slot, position) before a slot is adopted; raises if the device disagrees.

        Raises:
          ValueError: no prompt that fits the context could ever hit.
        """
        if cache_config.prefix_caching and cache_config.page_size > config.max_context - 2:
            raise ValueError(
                f"Pages of {cache_config.page_size} tokens in a context of {config.max_context}: no prompt "
                f"could ever hit. Lower CacheConfig.page_size, raise EngineConfig.max_context, or set "
                f"CacheConfig.prefix_caching=False."
            )
        self._cache, self._config, self._buckets = cache, config, buckets
        self._page, self._caching = cache_config.page_size, cache_config.prefix_caching
        self._num_kv_slots = cache_config.num_kv_slots
        self._check_stamp = check_stamp
        self._free_rows = list(range(config.max_running, 0, -1))
        self.running: list[Sequence] = []
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.stats = SchedulerStats()
        self._builder = StepBuilder(cache, cache_config, config, buckets, self.stats)

    def submit(self, sequence: Sequence) -> None:
        """Queues a request.

        Raises:
          ValueError: it has no token, or can never fit the context or the KV pool.
        """
        prompt, limit = sequence.prompt_len, self._config.max_context
        total = prompt + sequence.params.max_tokens
        if prompt < 1:
            raise ValueError("A prompt needs at least one token.")
        if total > limit:
            raise ValueError(
                f"{prompt} prompt tokens and max_tokens={sequence.params.max_tokens} exceed the context of "
                f"{limit}. Shorten the prompt, lower max_tokens, or raise EngineConfig.max_context."
            )
        if num_pages(total - 1, self._page) * self._page > self._num_kv_slots:
            raise ValueError(
                f"A request of {total} tokens can never fit {self._num_kv_slots} KV slots. "
                f"Raise CacheConfig.num_kv_slots."
            )
        self.waiting.append(sequence)
        for other in self.running:
            self._ask_early(other, sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a request at once; nothing of it is published any more. A finished one is left alone."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence, publish=False)
        sequence.status, sequence.finish_reason = Status.FINISHED, "abort"

    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def preempt_all(self) -> None:
        """Sends every running request back to the queue, unpublished; no step may be in flight."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence, publish=False)

    def schedule(self, in_flight: bool) -> Step | None:
        """Plans the next step, or None if nothing can run now.

        Args:
          in_flight: a step has been enqueued and not completed. Requests are preempted only without one,
            since their newest tokens must be known: after None, complete the step and ask again.
        """
        budget, preemptions = StepBudget(self._config, self._buckets), self.stats.preemptions
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING or (sequence.decoding and self._sits_out(sequence)):
                continue
            count = budget.tokens_for(sequence, self._page)
            if count and not self._reserve(sequence, sequence.kv_len + count, in_flight):
                if in_flight:
                    return None
                continue
            if count:
                budget.take(sequence, count, self._page)
        if self.stats.preemptions == preemptions:
            self._admit(budget, in_flight)
        chosen = [(seq, count) for seq, count in budget.chosen if seq.status is Status.RUNNING]
        return self._builder.build(chosen) if chosen else None

    def _sits_out(self, sequence: Sequence) -> bool:
        """Whether a decoding request has nothing to compute in a step."""
        return sequence.fully_scheduled

    def enqueued(self, step: Step) -> None:
        """Publishes a step's chunks; call once its plan has been enqueued, before the next `schedule`."""
        for sequence, row in step.extend:
            if sequence.status is not Status.RUNNING:
                continue
            self._unlock_checkpoint(sequence)
            for position, slot in row.exports:
                self._publish(sequence, position, slot)
            done = row.start + len(row.tokens)
            if done == sequence.target and sequence.owned_from < page_floor(
                sequence.prompt_len - 1, self._page
            ):
                # No state could be exported: the KV alone tells the next sharer where to take one.
                self._publish(sequence, page_floor(min(done, sequence.prompt_len - 1), self._page), 0)

    def complete(
        self, step: Step, tokens: np.ndarray, is_stop: Callable[[Sequence, int], bool]
    ) -> list[Sequence]:
        """Takes a step's tokens.

        Args:
          step: enqueued and finished on the device.
          tokens: int32, the step's sampled tokens.
          is_stop: called with a request and its newest token, already in its buffer.

        Returns:
          The requests that finished. What they overshot is freed.
        """
        finished = []
        for index, sequence in step.sampled:
            sequence.in_flight -= 1
            if sequence.status is not Status.RUNNING:
                continue
            token = int(tokens[index])
            sequence.buffer.append(token)
            self.stats.generated_tokens += 1
            if is_stop(sequence, token):
                sequence.finish_reason = "stop"
            elif sequence.num_generated >= sequence.params.max_tokens:
                sequence.finish_reason = "length"
            else:
                continue
            self._leave(sequence, publish=True)
            sequence.status = Status.FINISHED
            finished.append(sequence)
        return finished

    def check_invariants(self) -> None:
        """Recounts every slot: each has one owner, the tree, a request, or the free list."""
        kv = [slot for sequence in self.running for slot in sequence.owned_kv.tolist()]
        ssm = [slot for sequence in self.running for slot in sequence.owned_ssm]
        self._cache.check_invariants(kv, ssm)
        rows = [sequence.row for sequence in self.running]
        assert sorted([*rows, *self._free_rows]) == list(range(1, self._config.max_running + 1)), (
            f"request-table rows: {rows} in use and {self._free_rows} free."
        )
        for sequence in self.waiting:
            assert not sequence.owned_ssm, (
                f"request {sequence.request_id} waits and owns {sequence.owned_ssm}"
            )
            assert not len(sequence.kv_slots), f"request {sequence.request_id} waits and owns KV."
            assert sequence.lease is None, f"request {sequence.request_id} waits and holds a lease."

    def _admit(self, budget: StepBudget, in_flight: bool) -> None:
        held_back: list[Sequence] = []
        first_new = len(budget.chosen)
        while self.waiting and self._free_rows and budget.room_for_row():
            sequence = self.waiting.popleft()
            admitted = self._try_admit(sequence, budget)
            if admitted is None:
                held_back.append(sequence)
                continue
            if not admitted and not self.running and not in_flight:
                # Alone, and still no room: its own hit is in the way. Without it everything is evictable.
                admitted = self._try_admit(sequence, budget, reuse=False)
            if not admitted:
                self.waiting.appendleft(sequence)
                break
        self.waiting.extendleft(reversed(held_back))
        for other, _ in budget.chosen[first_new:]:
            for sequence in itertools.islice(self.waiting, self._config.max_running):
                self._ask_early(other, sequence)

    def _try_admit(self, sequence: Sequence, budget: StepBudget, reuse: bool = True) -> bool | None:
        """Admits a request if there is room; None if it should wait for another one to publish."""
        known = len(sequence.buffer)
        max_len = _reusable_len(sequence) if reuse else 0
        match = self._cache.match(sequence.buffer, sequence.namespace, max_len=max_len)
        if reuse and self._better_to_wait(sequence, match.prefix_len):
            return None
        count = budget.first_tokens(match.prefix_len, known - match.prefix_len, self._page)
        if not count:
            return False
        lease = self._cache.lock(match)
        # Room for its whole prompt and a page more for each request that runs, or it would soon be sent back.
        wanted = (num_pages(known, self._page) + len(self.running)) * self._page - match.prefix_len
        if self.running and self._cache.kv[0].num_free + self._cache.evictable_kv() < wanted:
            self._cache.unlock(lease)
            return False
        pages = num_pages(match.prefix_len + count, self._page) - match.prefix_len // self._page
        try:
            working = int(self._cache.allocate_ssm(1)[0])
        except OutOfSlots:
            self._cache.unlock(lease)
            return False
        try:
            fresh = self._cache.allocate_kv(pages * self._page)
        except OutOfSlots:
            self._cache.free_ssm(np.array([working], np.int32))
            self._cache.unlock(lease)
            return False
        sequence.status, sequence.row, sequence.lease = Status.RUNNING, self._free_rows.pop(), lease
        sequence.kv_len = sequence.owned_from = match.prefix_len
        sequence.target, sequence.waited = known, 0
        sequence.read_slot, sequence.working_slot = match.checkpoint_slot, working
        sequence.append_kv(match.kv_slots)
        sequence.append_kv(fresh)
        if match.branch_position is not None:
            sequence.ask_branch(match.branch_position)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = match.prefix_len
            self.stats.prompt_tokens += sequence.prompt_len
            self.stats.cached_tokens += match.prefix_len
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.request_id)
        budget.take(sequence, count, self._page)
        return True

    def _better_to_wait(self, sequence: Sequence, hit: int) -> bool:
        """Whether a running prefill will soon publish a longer prefix; asks it for a checkpoint there.

        A prefix that is longer by less than a block saves no work worth a wait.
        """
        if sequence.waited >= self._config.max_wait_steps:
            return False
        for other in self.running:
            shared = self._shared_ahead(other, sequence)
            if shared >= hit + self._config.block_tokens:
                other.ask_branch(shared)
                sequence.waited += 1
                self.stats.waits += 1
                return True
        return False

    def _ask_early(self, other: Sequence, sequence: Sequence) -> None:
        """Asks a prefill for a checkpoint where a request leaves it that has no room yet.

        Once there is room the prefill may have passed that position, and all of it be computed again. What
        saves less than a block is not worth a slot.
        """
        shared = self._shared_ahead(other, sequence)
        if shared >= other.kv_len + self._config.block_tokens:
            other.ask_branch(shared)

    def _shared_ahead(self, other: Sequence, sequence: Sequence) -> int:
        """How far a running prefill will get on the tokens of another request; 0 if it shares no more."""
        if not self._caching or other.decoding or other.namespace != sequence.namespace:
            return 0
        shared = min(sequence.buffer.common_prefix_len(other.buffer), _reusable_len(sequence))
        shared = page_floor(shared, self._page)
        return shared if other.kv_len < shared <= other.target else 0

    def _reserve(self, sequence: Sequence, length: int, in_flight: bool) -> bool:
        """Gives a running request KV for `length` tokens, preempting later ones if nothing is in flight."""
        while (missing := sequence.pages_missing(length, self._page)) > 0:
            try:
                sequence.append_kv(self._cache.allocate_kv(missing * self._page))
            except OutOfSlots:
                if in_flight:
                    return False
                victim = self.running[-1]
                self._preempt(victim, publish=True)
                if victim is sequence:
                    return False
        return True

    def _preempt(self, sequence: Sequence, publish: bool) -> None:
        self._leave(sequence, publish)
        sequence.status = Status.WAITING
        sequence.kv_len = sequence.target = sequence.owned_from = 0
        at = sum(other.request_id < sequence.request_id for other in self.waiting)
        self.waiting.insert(at, sequence)
        self.stats.preemptions += 1

    def _leave(self, sequence: Sequence, publish: bool) -> None:
        """Takes a request off its row; what is worth keeping goes to the tree, the rest is freed."""
        if publish:
            # The working state has folded kv_len tokens but those pending; a stop token is the last it can.
            end, folded = page_floor(sequence.kv_len, self._page), sequence.kv_len - sequence.pending_len
            whole = folded <= sequence.kv_len and folded % self._page == 0
            whole = whole and sequence.read_slot == sequence.working_slot
            if sequence.track_slot and sequence.track_position > sequence.owned_from and not whole:
                slot, sequence.track_slot = sequence.track_slot, 0
                self._publish(sequence, sequence.track_position, slot)
            if whole and folded > sequence.owned_from:
                slot, sequence.working_slot = sequence.working_slot, 0
                self._publish(sequence, folded, slot)
            if end > sequence.owned_from:
                self._publish(sequence, end, 0)
        if len(sequence.owned_kv):
            self._cache.free_kv(sequence.owned_kv)
        if sequence.owned_ssm:
            self._cache.free_ssm(np.array(sequence.owned_ssm, np.int32))
        if sequence.lease is not None:
            self._cache.unlock(sequence.lease)
        self._free_rows.append(sequence.row)
        self.running.remove(sequence)
        sequence.row = sequence.working_slot = sequence.track_slot = sequence.read_slot = 0
        sequence.pending_len, sequence.fresh = 0, True
        sequence.lease, sequence.branches = None, ()
        sequence.clear_kv()

    def _publish(self, sequence: Sequence, position: int, slot: int) -> None:
        """Gives the tree a request's KV up to `position`, and `slot` as the state there (0: none)."""
        if position <= sequence.owned_from:
            if slot:
                self._cache.free_ssm(np.array([slot], np.int32))
            return
        if slot and self._check_stamp is not None:
            self._check_stamp(slot, position)
        inserted = self._cache.insert(
            sequence.buffer,
            sequence.kv_slots[sequence.owned_from : position],
            slot,
            namespace=sequence.namespace,
            stamp=sequence.buffer.stamp(position) if slot else None,
            length=position,
            lease=sequence.lease,
        )
        if slot and not inserted.adopted:
            self._cache.free_ssm(np.array([slot], np.int32))
        if not self._caching:
            return
        sequence.replace_kv(sequence.owned_from, inserted.kv_slots)
        sequence.owned_from = position
        if sequence.lease is None:
            sequence.lease = self._cache.lock(inserted, ssm=False)
        else:
            self._cache.renew(sequence.lease, inserted, ssm=False)

    def _unlock_checkpoint(self, sequence: Sequence) -> None:
        """The step that reads the leased checkpoint is enqueued: from now on only its KV must stay."""
        if sequence.read_slot != sequence.working_slot:
            sequence.read_slot = sequence.working_slot
            if sequence.lease is not None:
                sequence.lease = self._cache.relax(sequence.lease)


def _reusable_len(sequence: Sequence) -> int:
    """Most positions to take from the cache: one token at least is left to compute logits from."""
    last = len(sequence.buffer) - 1
    return last if sequence.reuse_limit is None else min(last, sequence.reuse_limit)
