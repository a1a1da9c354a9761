"""What the engine gives back."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Timings:
    """When things happened to a request, in seconds of `time.perf_counter`.

    Attributes:
      submitted: it was queued.
      admitted: it first got slots.
      first_token: the host learned its first token.
      finished: the host learned its last token.
    """

    submitted: float
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """Time to first token in milliseconds, from admission; NaN if the request never got one."""
        if not self.first_token:
            return math.nan
        return (self.first_token - self.admitted) * 1e3


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      request_id: what `Engine.submit` returned.
      token_ids: generated tokens, a stop token included.
      text: their text, without stop token or stop string.
      finish_reason: "stop", "length" or "abort".
      prompt_len: tokens of the prompt.
      cached_tokens: of those, taken from the cache.
      computed_tokens: prompt positions computed, recomputation after a preemption included.
      timings: when things happened.
      logits: float32 `[len(token_ids), vocab]` with `EngineConfig.return_logits`, else None.
    """

    request_id: int
    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_len: int
    cached_tokens: int
    computed_tokens: int
    timings: Timings
    logits: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Delta:
    """What a streaming request produced since the last one.

    Attributes:
      text: whole characters only; empty while a character is incomplete.
      token_ids: the tokens behind it.
      finish_reason: set on the last one.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and pool use now.

    Attributes:
      requests: finished requests.
      prompt_tokens: tokens of admitted prompts.
      computed_tokens: prompt positions computed.
      cached_tokens: prompt positions taken from the cache.
      generated_tokens: tokens sampled and kept.
      kv_used, kv_total: KV slots owned by tree or requests, and usable ones.
      ssm_used, ssm_total: SSM slots likewise.
      kv_evicted, ssm_evicted: slots freed by eviction.
      tombstones: nodes that keep KV and have no checkpoint, now.
      skipped_checkpoints: checkpoints not taken, for lack of a slot or because a row exports only so many.
      preemptions: requests sent back for lack of slots.
      compiles: step programs traced, by all engines that share the model and the mode.
      spec_rounds: rounds of speculation, counted once for each row.
      spec_tokens: tokens that they gave; divided by the rounds, the tokens of a pass.
      spec_accepted: rounds that accepted at least `i + 1` drafts, for each `i`.
      recompiles_after_warmup: programs that JAX compiled in this process during steps after `warm_up`.
    """

    requests: int
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    generated_tokens: int
    kv_used: int
    kv_total: int
    ssm_used: int
    ssm_total: int
    kv_evicted: int
    ssm_evicted: int
    tombstones: int
    skipped_checkpoints: int
    preemptions: int
    compiles: int
    spec_rounds: int
    spec_tokens: int
    spec_accepted: tuple[int, ...]
    recompiles_after_warmup: int
