"""The engine that people call: prompts in, text out, through one hybrid cache."""

import functools
import pathlib
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as TokenSequence

import jax
import numpy as np

from mambacache_jax.cache import HybridCache
from mambacache_jax.config import CacheConfig, EngineConfig, SamplingParams, SpecConfig
from mambacache_jax.engine.checks import check_configs
from mambacache_jax.engine.compiles import num_compiles
from mambacache_jax.engine.request import Request
from mambacache_jax.engine.rounds import RoundStats, SpeculativeScheduler
from mambacache_jax.engine.scheduler import Scheduler, Step
from mambacache_jax.engine.speculation import Speculation
from mambacache_jax.engine.step import StepOutput, step_program
from mambacache_jax.engine.types import Completion, Delta, EngineStats
from mambacache_jax.host import Sequence, Status, TokenBuffer, build_plan, make_buckets, num_blocks
from mambacache_jax.host.namespace import AnyNamespace, check_namespace
from mambacache_jax.host.round_plan import build_round_plan
from mambacache_jax.models import Model, load

Prompt = str | TokenSequence[int] | np.ndarray


class Engine:
    """Continuous batching over one model and one hybrid cache. Not thread-safe: one caller drives it.

    Attributes:
      model: weights and tokenizer.
      config: how it batches.
      cache: the host tree and the pools.
    """

    def __init__(
        self,
        model: str | pathlib.Path | Model = "tiny",
        cache: CacheConfig | None = None,
        config: EngineConfig | None = None,
        spec: SpecConfig | None = None,
    ) -> None:
        """Loads the model and allocates the pools; compiles nothing yet.

        Args:
          model: "tiny", a folder that its training script wrote, a checkpoint folder with config.json and
            safetensors, or a loaded model (engines of one model share programs; `models.load` also takes a
            dtype).
          cache: sizes and rules of the cache; by default room for eight full contexts, with states stored as
            the checkpoint asks (`budget.plan_cache` fills a number of bytes).
          config: batching; by default as `EngineConfig()`, with the context cut to the model's.
          spec: draft tokens ahead and verify them; None decodes token by token. The text is the same.

        Raises:
          ValueError: the model is unknown, or a size is impossible.
        """
        self.model = model if isinstance(model, Model) else load(model)
        if config is None:
            config = EngineConfig(max_context=min(EngineConfig.max_context, self.model.max_context))
        check_configs(self.model, cache, config, spec)
        self.config = config
        cache = cache or CacheConfig(
            num_kv_slots=8 * config.max_context,
            num_ssm_slots=4 * config.max_running + 64,
            state_dtype="float32" if config.deterministic else self.model.state_dtype,
        )
        self._buckets = make_buckets(config, cache.page_size, rounds=spec is not None)
        self._spec = spec
        self._program = step_program(self.model, cache.page_size, config.deterministic, config.return_logits)
        self._make_empty(cache)
        self._requests: dict[int, Request] = {}
        self._unclaimed: list[Completion] = []
        self._next_id = 1
        self._finished = 0
        self._warm = False
        self._recompiles = 0

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | TokenSequence[SamplingParams] | None = None,
        namespace: AnyNamespace = None,
    ) -> list[Completion]:
        """Runs prompts to their end, batched, and returns them in order.

        Args:
          prompts: texts or token ids.
          params: one for all, or one each.
          namespace: prompts share prefixes only with others of the same namespace.

        Raises:
          ValueError: a prompt is empty or can never fit, or `params` has another length; nothing was run.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of prompts, got one string.")
        prompts = list(prompts)
        each = (
            [params or SamplingParams()] * len(prompts) if not isinstance(params, TokenSequence) else params
        )
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} sampling parameters.")
        done: dict[int, Completion | None] = {}
        try:
            for pair in zip(prompts, each, strict=True):
                done[self.submit(*pair, namespace)] = None
            left = len(done)
            while left:
                for completion in self._advance():
                    if completion.request_id in done:
                        done[completion.request_id] = completion
                        left -= 1
                    else:
                        self._unclaimed.append(completion)
        except BaseException:
            self._forget(done)
            raise
        return [completion for completion in done.values() if completion is not None]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, namespace: AnyNamespace = None
    ) -> Iterator[Delta]:
        """Queues one prompt, and yields its text as it comes; leaving the iterator aborts the request."""
        return self._deltas(self._submit(prompt, params or SamplingParams(), namespace))

    def _deltas(self, request: Request) -> Iterator[Delta]:
        try:
            while True:
                delta = request.take_delta()
                if delta.token_ids or delta.finish_reason:
                    yield delta
                if delta.finish_reason:
                    return
                self._unclaimed.extend(self._advance())
        finally:
            self._forget([request.sequence.request_id])

    def logits(self, token_ids: TokenSequence[int] | np.ndarray, *, start: int = 0) -> np.ndarray:
        """The model's logits of a token sequence, computed through the same pools.

        The programs that return every position's logits are compiled on first use, not by `warm_up`.

        Args:
          token_ids: the sequence; no longer than the context less one.
          start: positions below may come from the cache, their logits are not returned.

        Returns:
          float32 `[len(token_ids) - start, vocab]`: row i holds the logits after position `start + i`.
        """
        if not 0 <= start < len(token_ids):
            raise ValueError(f"start={start} must be in [0, {len(token_ids)}).")
        request = self._submit(
            token_ids, SamplingParams(max_tokens=1), None, reuse_limit=start, keep_logits=True
        )
        try:
            while request.sequence.status is not Status.FINISHED:
                self._unclaimed.extend(self._advance())
        finally:
            self._forget([request.sequence.request_id])
        assert request.all_logits is not None
        return request.all_logits[start:]

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, namespace: AnyNamespace = None
    ) -> int:
        """Queues a prompt and returns its id; `step` moves it on.

        Raises:
          ValueError: the prompt is empty, holds ids outside the vocabulary, or can never fit.
        """
        return self._submit(prompt, params or SamplingParams(), namespace).sequence.request_id

    def abort(self, request_id: int) -> None:
        """Ends a request; its completion, with reason "abort", comes from the next `step`.

        A request that is finished or unknown is left alone, since a client may hang up at any time.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._scheduler.abort(request.sequence)
            self._unclaimed.append(self._finish(request))

    def step(self) -> list[Completion]:
        """Plans and enqueues one step, then takes the results of the one before; returns what finished."""
        unclaimed, self._unclaimed = self._unclaimed, []
        return unclaimed + self._advance()

    def has_work(self) -> bool:
        """Whether a call to `step` would do or return anything."""
        return bool(self._scheduler.has_work() or self._in_flight or self._unclaimed)

    def warm_up(self, prompts: Iterable[Prompt] = (), namespace: AnyNamespace = None) -> None:
        """Compiles every bucket, then computes and publishes shared prefixes, of any length.

        Args:
          prompts: prefixes that later prompts begin with. Each is in the cache afterwards, with a checkpoint
            at its end (its last page boundary).
          namespace: where to publish them.
        """
        for shape in self._buckets.shapes():
            plan = build_plan((), (), (), shape)
            output = self.cache.run(functools.partial(self._program, shape=shape, all_logits=False), plan)
            jax.block_until_ready(output.tokens)
        if self._speculation is not None:
            rounds, scheduler = self._speculation
            for round_shape in scheduler.shapes():
                rounds.run(self.cache, build_round_plan((), (), round_shape), round_shape)
        self._warm = True
        self.generate(prompts, SamplingParams(max_tokens=1), namespace)

    def stats(self) -> EngineStats:
        """Counts so far, and pool use now."""
        host, counts = self.cache.host, self._scheduler.stats
        tree = host.stats()
        rounds = self._speculation[1].rounds if self._speculation else RoundStats(0, 0, [])
        return EngineStats(
            requests=self._finished,
            prompt_tokens=counts.prompt_tokens,
            computed_tokens=counts.computed_tokens,
            cached_tokens=counts.cached_tokens,
            generated_tokens=counts.generated_tokens,
            kv_used=tree.kv_used,
            kv_total=tree.kv_total,
            ssm_used=tree.ssm_used,
            ssm_total=tree.ssm_total,
            kv_evicted=tree.kv_evicted,
            ssm_evicted=tree.ssm_evicted + tree.ssm_lost_with_kv,
            tombstones=tree.tombstones,
            skipped_checkpoints=tree.skipped["no_slot"] + tree.skipped["limit"],
            preemptions=counts.preemptions,
            compiles=self._program.traces + (self._speculation[0].program.traces if self._speculation else 0),
            spec_rounds=rounds.rounds,
            spec_tokens=rounds.tokens,
            spec_accepted=tuple(rounds.accepted),
            recompiles_after_warmup=self._recompiles,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError unless every slot has exactly one owner and all counts add up."""
        self._scheduler.check_invariants()

    def reset(self) -> None:
        """Empties the cache. Requests in flight stay, and compute their prompts again from the start."""
        self._unclaimed.extend(self._drain())
        self._scheduler.preempt_all()
        self.cache.host.reset()

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        namespace: AnyNamespace,
        reuse_limit: int | None = None,
        keep_logits: bool = False,
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"Sampling parameters must be SamplingParams, got {params!r}.")
        check_namespace(namespace)
        tokens = self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else np.asarray(prompt)
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise ValueError(
                f"A prompt is a text or a list of token ids, got {tokens.dtype} of shape {tokens.shape}."
            )
        outside = (tokens < 0) | (tokens >= self.model.vocab_size)
        if outside.any():
            raise ValueError(
                f"Token id {tokens[outside][0]} is outside the vocabulary of {self.model.vocab_size}."
            )
        sequence = Sequence(
            request_id=self._next_id,
            buffer=TokenBuffer(tokens.astype(np.int32)),
            prompt_len=len(tokens),
            params=params,
            namespace=namespace,
            reuse_limit=reuse_limit,
            keep_logits=keep_logits,
        )
        request = Request(sequence, self.model)
        self._scheduler.submit(sequence)
        self._next_id += 1
        if keep_logits:
            request.all_logits = np.zeros((len(tokens), self.model.vocab_size), np.float32)
        self._requests[sequence.request_id] = request
        return request

    def _advance(self) -> list[Completion]:
        """One step; whatever interrupts it leaves an engine that works."""
        try:
            return self._one_step()
        except BaseException:
            self._start_over()
            raise

    def _one_step(self) -> list[Completion]:
        compiles = num_compiles()
        step = self._scheduler.schedule(in_flight=self._in_flight is not None)
        finished: list[Completion] = []
        if step is None and self._in_flight is not None:
            # Nothing can be planned ahead: learn the last tokens first. The next call plans again.
            finished = self._drain()
        elif step is not None:
            now = time.perf_counter()
            for sequence in (*step.decode, *(sequence for sequence, _ in step.extend)):
                timings = self._requests[sequence.request_id].timings
                timings.admitted = timings.admitted or now
            program = functools.partial(self._program, shape=step.shape, all_logits=step.all_logits)
            output = self.cache.run(program, step.plan)
            self._scheduler.enqueued(step)
            before, self._in_flight = self._in_flight, (step, output)
            finished = self._complete(*before) if before else []
        elif self._scheduler.has_work() and not (self._speculation and self._scheduler.running):
            raise RuntimeError("Requests are left, and none of them can be planned.")
        if self._speculation is not None:
            finished += self._one_round(*self._speculation)
        if self._warm:
            self._recompiles += num_compiles() - compiles
        return finished

    def _one_round(self, rounds: Speculation, scheduler: SpeculativeScheduler) -> list[Completion]:
        """A round of speculation for all answers; what it follows on is learned first."""
        finished = self._drain()
        if step := scheduler.schedule_round():
            tokens, length = rounds.run(self.cache, step.plan, step.shape)
            done = scheduler.complete_round(step, tokens, length, self._push)
            finished += [self._finish(self._requests[sequence.request_id]) for sequence in done]
        return finished

    def _push(self, sequence: Sequence, token: int) -> bool:
        return self._requests[sequence.request_id].push(token)

    def _drain(self) -> list[Completion]:
        """Completes the step in flight, if any."""
        if self._in_flight is None:
            return []
        in_flight, self._in_flight = self._in_flight, None
        return self._complete(*in_flight)

    def _complete(self, step: Step, output: StepOutput) -> list[Completion]:
        tokens = np.asarray(output.tokens)
        now = time.perf_counter()
        logits = None if output.logits is None else np.asarray(output.logits)
        for index, sequence in step.sampled:
            request = self._requests.get(sequence.request_id)
            if request is not None and sequence.status is Status.RUNNING:
                request.timings.first_token = request.timings.first_token or now
                if logits is not None:
                    request.logits.append(logits[index])
        if output.all_logits is not None:
            self._keep_logits(step, np.asarray(output.all_logits))
        finished = self._scheduler.complete(step, tokens, self._push)
        return [self._finish(self._requests[sequence.request_id]) for sequence in finished]

    def _keep_logits(self, step: Step, all_logits: np.ndarray) -> None:
        block = 0
        for sequence, row in step.extend:
            request = self._requests.get(sequence.request_id)
            if request is not None and request.all_logits is not None:
                first, count = block * self.config.block_tokens, len(row.tokens)
                request.all_logits[row.start : row.start + count] = all_logits[first : first + count]
            block += num_blocks(len(row.tokens), self.config.block_tokens)

    def _make_empty(self, cache: CacheConfig) -> None:
        """Fresh pools, an empty tree, and a scheduler without requests."""
        self.cache = HybridCache(self.model.specs, cache, self.config, self.model.dtype)
        check = self.cache.check_stamp if self.config.debug else None
        parts = (self.cache.host, cache, self.config, self._buckets, check)
        self._speculation: tuple[Speculation, SpeculativeScheduler] | None = None
        if self._spec is None:
            self._scheduler = Scheduler(*parts)
        else:
            rounds = Speculation(self.model, self._spec, cache, self.config)
            scheduler = SpeculativeScheduler(*parts, self._spec, rounds.program.host_draft, rounds.lazy)
            self._scheduler, self._speculation = scheduler, (rounds, scheduler)
        self._in_flight: tuple[Step, StepOutput] | None = None

    def _start_over(self) -> None:
        """After a step that was cut short: the cache is emptied, and every request ends as aborted.

        What such a step had given away or written is not known, and a donated pool may be gone.
        """
        self._make_empty(self.cache.config)
        for request in list(self._requests.values()):
            sequence = request.sequence
            sequence.status, sequence.finish_reason = Status.FINISHED, "abort"
            self._unclaimed.append(self._finish(request))

    def _forget(self, request_ids: Iterable[int]) -> None:
        """Aborts what is left of some requests, and drops their completions."""
        gone = frozenset(request_ids)
        for request_id in gone:
            self.abort(request_id)
        self._unclaimed = [c for c in self._unclaimed if c.request_id not in gone]

    def _finish(self, request: Request) -> Completion:
        request.finish()
        del self._requests[request.sequence.request_id]
        self._finished += 1
        return request.complete()
