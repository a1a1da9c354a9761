"""Requests through an engine in a closed loop, and what was measured on the way."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mambacache_jax.config import SamplingParams

if TYPE_CHECKING:
    from mambacache_jax.engine import Completion, Engine, EngineStats


@dataclasses.dataclass(frozen=True)
class PoolUse:
    """Slots in use when a request finished, `seconds` after the start."""

    seconds: float
    kv_used: int
    ssm_used: int


@dataclasses.dataclass(frozen=True)
class Replay:
    """One run.

    Attributes:
      completions: in the order of the requests.
      order: the requests' indices in the order in which they finished.
      seconds: wall time of the run.
      pool_use: one entry for each finished request.
      stats: the engine's counters at the end.
      broken: what `check_invariants` said at the end; empty when all of them hold.
    """

    completions: "list[Completion]"
    order: list[int]
    seconds: float
    pool_use: list[PoolUse]
    stats: "EngineStats"
    broken: str

    @property
    def prompt_tokens(self) -> int:
        return sum(c.prompt_len for c in self.completions)

    @property
    def cached_tokens(self) -> int:
        return sum(c.cached_tokens for c in self.completions)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return sum(c.computed_tokens for c in self.completions)

    @property
    def generated_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    def ttft_ms(self, only: Sequence[int] | None = None) -> np.ndarray:
        """Milliseconds from admission to the first token, of all requests or of those named."""
        chosen = self.completions if only is None else [self.completions[i] for i in only]
        return np.array([c.timings.ttft_ms for c in chosen])


def replay(
    engine: "Engine",
    prompts: Sequence[str],
    params: Sequence[SamplingParams],
    sessions: Sequence[int],
    concurrency: int,
    on_finish: Callable[[], None] = lambda: None,
) -> Replay:
    """Sends every prompt, keeping `concurrency` requests in flight.

    The next request is the first one left whose conversation has none in flight: a turn is sent when the turn
    before it has been answered.

    Args:
      engine: idle; warmed up, so that no compilation is measured.
      prompts: in order of arrival.
      params: of each prompt.
      sessions: the conversation of each prompt, -1 for none.
      concurrency: requests in flight.
      on_finish: called whenever a request finishes.
    """
    waiting = list(range(len(prompts)))
    running: dict[int, int] = {}
    finished: dict[int, Completion] = {}
    pool_use: list[PoolUse] = []
    start = time.perf_counter()
    while waiting or running:
        busy = {sessions[i] for i in running.values()} - {-1}
        for index in list(waiting):
            if len(running) == concurrency:
                break
            if sessions[index] not in busy:
                running[engine.submit(prompts[index], params[index])] = index
                waiting.remove(index)
                if sessions[index] >= 0:
                    busy.add(sessions[index])
        for completion in engine.step():
            finished[running.pop(completion.request_id)] = completion
            stats = engine.stats()
            pool_use.append(PoolUse(time.perf_counter() - start, stats.kv_used, stats.ssm_used))
            on_finish()
    seconds = time.perf_counter() - start
    while engine.has_work():  # a step that ran past the last stop may still be in flight
        engine.step()
    broken = ""
    try:
        engine.check_invariants()
    except AssertionError as error:
        broken = str(error) or "an assertion without a message"
    return Replay(
        completions=[finished[i] for i in range(len(prompts))],
        order=list(finished),
        seconds=seconds,
        pool_use=pool_use,
        stats=engine.stats(),
        broken=broken,
    )
