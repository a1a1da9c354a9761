"""Drives a scheduler over a symbolic device, step by step as `Engine` does, and checks all it does."""

from typing import Any

import numpy as np

from mambacache_jax.config import CacheConfig, EngineConfig, SamplingParams
from mambacache_jax.engine.batch import Step
from mambacache_jax.engine.scheduler import Scheduler
from mambacache_jax.errors import StampMismatch
from mambacache_jax.host import make_prefix_cache
from mambacache_jax.host.key import TokenBuffer
from mambacache_jax.host.plan import make_buckets
from mambacache_jax.host.sequence import Sequence, Status

from .symbolic import KV, State, SymbolicDevice, plain, states


class SymbolicEngine:
    """Requests over a symbolic device; texts are compared with the plain loop's as they finish.

    Attributes:
      cache_config, config: its sizes.
      vocab: tokens are in `[0, vocab)`.
      host: the prefix cache.
      device: the symbolic device.
      scheduler: what is tested.
      live: requests not finished, by id.
      finished: sequences that finished, in that order; aborted ones left out.
      in_flight: the step enqueued and not completed, with its tokens.
      steps: steps enqueued.
    """

    def __init__(self, cache: CacheConfig, config: EngineConfig, vocab: int = 50, seed: int = 0) -> None:
        self.cache_config, self.config, self.vocab = cache, config, vocab
        self.host = make_prefix_cache(cache)
        self.device = SymbolicDevice(cache, config, vocab, seed)
        buckets = make_buckets(config, cache.page_size)
        self.scheduler = Scheduler(self.host, cache, config, buckets, self._check_stamp)
        self.live: dict[int, Sequence] = {}
        self.finished: list[Sequence] = []
        self.in_flight: tuple[Step, np.ndarray] | None = None
        self.steps = 0
        self._submitted: list[Sequence] = []
        self._oldest, self._oldest_turns, self._patience = -1, 0, 0

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        stop: tuple[int, ...] = (),
        seed: int = 0,
        namespace: str | None = None,
        reuse_limit: int | None = None,
    ) -> Sequence:
        """Queues a prompt; a seed other than 0 samples."""
        params = SamplingParams(max_tokens, 1.0 if seed else 0.0, seed=seed, stop_token_ids=stop)
        buffer = TokenBuffer(np.array(prompt, np.int32))
        sequence = Sequence(len(self._submitted) + 1, buffer, len(prompt), params, namespace, reuse_limit)
        self.scheduler.submit(sequence)
        self._submitted.append(sequence)
        self.live[sequence.request_id] = sequence
        return sequence

    def send(self, prompt: list[int], max_tokens: int = 1, **options: Any) -> Sequence:
        """Submits a prompt and runs until it has finished."""
        sequence = self.submit(prompt, max_tokens, **options)
        self.run(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Aborts a request wherever it stands."""
        self.scheduler.abort(sequence)
        self.live.pop(sequence.request_id, None)

    def step(self) -> Step | None:
        """One turn of the engine's loop: plan, enqueue, publish, then complete the step before."""
        self._check_oldest()
        step = self.scheduler.schedule(in_flight=self.in_flight is not None)
        if step is None:
            stuck = self.scheduler.has_work() and not self.in_flight
            assert not stuck, "requests are left, and none of them can be planned."
            self.drain()
            return None
        tokens = self.device.run(step.plan, step.shape)
        self.scheduler.enqueued(step)
        before, self.in_flight = self.in_flight, (step, tokens)
        self.steps += 1
        if before:
            self.complete(*before)
        return step

    def drain(self) -> None:
        """Completes the step in flight, if any."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight:
            self.complete(*in_flight)

    def preempt_all(self) -> None:
        """Sends all running requests back to the queue."""
        self.drain()
        self.scheduler.preempt_all()
        self._oldest = -1

    def reset(self) -> None:
        """As `Engine.reset`: running requests go back to the queue and the cache is emptied."""
        self.preempt_all()
        self.host.reset()

    def run(self, *sequences: Sequence) -> list[list[int]]:
        """Steps until `sequences`, or all requests, have finished; returns their texts."""
        wanted = sequences or tuple(self.live.values())
        while not all(sequence.status is Status.FINISHED for sequence in wanted):
            self.step()
            self.check()
        self.drain()
        return [generated(sequence) for sequence in wanted]

    def skipped(self, reason: str) -> int:
        """Checkpoints not taken for this reason, in all namespaces."""
        return self.host.stats().skipped[reason]

    def check(self) -> None:
        """Each slot has one owner, and each slot with an owner holds what its owner believes."""
        self.scheduler.check_invariants()
        self.check_tree()
        for sequence in self.scheduler.running:
            self._check_sequence(sequence)

    def check_tree(self) -> None:
        """KV and checkpoints of the whole tree equal a recomputation from its tokens."""
        stack = [([], node) for root in self.host.to_dict()["roots"] for node in root["children"]]
        while stack:
            above, node = stack.pop()
            tokens = above + node["tokens"]
            expected = states(tokens)
            self._check_kv(tokens, expected, len(above), node["kv_slots"])
            if slot := node["checkpoint_slot"]:
                assert self.device.ssm[slot] == expected[-1], (
                    f"slot {slot} at {len(tokens)} is another state."
                )
            stack += [(tokens, child) for child in node["children"]]

    def checkpoints(self, namespace: str | None = None) -> list[int]:
        """Positions of the checkpoints in the tree, ascending."""
        roots = [root for root in self.host.to_dict()["roots"] if root["namespace"] == namespace]
        stack = [node for root in roots for node in root["children"]]
        found = []
        while stack:
            node = stack.pop()
            found += [node["position"]] if node["checkpoint_slot"] else []
            stack += node["children"]
        return sorted(found)

    def check_idle(self) -> None:
        """Nothing runs, and every slot is free or the tree's."""
        assert not self.scheduler.has_work()
        assert self.in_flight is None
        self.check()
        stats = self.host.stats()
        assert (stats.kv_used, stats.ssm_used) == (stats.kv_cached, stats.ssm_cached), stats
        assert (stats.kv_protected, stats.ssm_protected) == (0, 0), stats

    def _check_oldest(self) -> None:
        """First come first served: the oldest request finishes in a bounded number of turns.

        It may have to wait for what is ahead of it on the device, then computes a token every other turn.
        """
        oldest = min(self.live, default=0)
        if oldest != self._oldest:
            total = sum(seq.prompt_len + seq.params.max_tokens for seq in self.live.values())
            # Nothing starves without requests, but a test may wait for what never comes.
            self._patience = 10 + 2 * total + self.config.max_wait_steps if oldest else 1000
            self._oldest, self._oldest_turns = oldest, 0
        self._oldest_turns += 1
        assert self._oldest_turns <= self._patience, f"request {oldest} starves: {self.live.get(oldest)}"

    def _check_source(self, sequence: Sequence) -> None:
        """What a request took from the cache, another one of its namespace had."""
        shared = [
            sequence.buffer.common_prefix_len(other.buffer)
            for other in self._submitted
            if other is not sequence and other.namespace == sequence.namespace
        ]
        assert (sequence.cached_tokens or 0) <= max(shared, default=0), f"{sequence} hit another's prefix."

    def _check_sequence(self, sequence: Sequence) -> None:
        """What a running request owns or leases, as far as its tokens are known."""
        known = sequence.buffer.array(0, len(sequence.buffer)).tolist()
        expected = states(known)
        length = min(sequence.kv_len, len(known))
        self._check_kv(known, expected, 0, sequence.kv_slots[:length].tolist())
        if sequence.read_slot and sequence.kv_len <= len(known):
            assert self.device.ssm[sequence.read_slot] == expected[sequence.kv_len]
        if sequence.track_slot and sequence.track_position <= len(known):
            assert self.device.ssm[sequence.track_slot] == expected[sequence.track_position]

    def _check_kv(self, tokens: list[int], expected: list[State], start: int, slots: list[int]) -> None:
        for position, slot in enumerate(slots, start):
            kv = KV(tokens[position], position, expected[position + 1].prefix)
            assert self.device.kv[slot] == kv, f"KV slot {slot} holds {self.device.kv[slot]}, not {kv}."

    def _check_stamp(self, slot: int, position: int) -> None:
        written = self.device.ssm[slot].position
        if written != position:
            raise StampMismatch(f"SSM slot {slot} is offered at {position} and was written at {written}.")

    def complete(self, step: Step, tokens: np.ndarray) -> None:
        """Takes the tokens of a step, and compares the texts of the requests that finish."""

        def is_stop(sequence: Sequence, token: int) -> bool:
            return token in sequence.params.stop_token_ids

        for sequence in self.scheduler.complete(step, tokens, is_stop):
            del self.live[sequence.request_id]
            self.finished.append(sequence)
            prompt = sequence.buffer.array(0, sequence.prompt_len).tolist()
            text, reason = plain(prompt, sequence.params, self.vocab)
            assert (generated(sequence), sequence.finish_reason) == (text, reason)
            self._check_source(sequence)


def generated(sequence: Sequence) -> list[int]:
    """The tokens that a request has generated, as far as the host knows."""
    return sequence.buffer.array(sequence.prompt_len, len(sequence.buffer)).tolist()


def small_engine(
    kv: int = 512,
    ssm: int = 64,
    page: int = 1,
    *,
    caching: bool = True,
    track: int = 256,
    interval: int = 0,
    budget: int = 16,
    block: int = 4,
    running: int = 4,
    rows: int = 4,
    wait: int = 64,
    context: int = 128,
    deterministic: bool = False,
    vocab: int = 1000,
) -> SymbolicEngine:
    """An engine whose sizes are round: pools that last, blocks of 4 tokens, and 4 of them a step."""
    cache = CacheConfig(kv, ssm, page, caching, track, interval)
    config = EngineConfig(
        max_running=running,
        max_context=context,
        token_budget=budget,
        block_tokens=block,
        max_extend_rows=rows,
        max_wait_steps=wait,
        deterministic=deterministic,
    )
    return SymbolicEngine(cache, config, vocab)


def writes(step):
    """SSM slots that a step writes, by working slot or export."""
    fields = step.shape.unpack(step.plan)
    slots = [
        *fields["decode_write"].tolist(),
        *fields["write"].tolist(),
        *fields["export_slot"].ravel().tolist(),
    ]
    return {slot for slot in slots if slot}


def tree_slots(engine):
    """SSM slots that the tree owns."""
    stack, found = list(engine.host.to_dict()["roots"]), set()
    while stack:
        node = stack.pop()
        found.add(node.get("checkpoint_slot", 0))
        stack += node["children"]
    return found - {0}
