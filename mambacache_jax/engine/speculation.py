"""Rounds of speculation as compiled programs over donated pools."""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from mambacache_jax.cache import HybridCache
from mambacache_jax.config import AttentionSpec, CacheConfig, EngineConfig, SpecConfig
from mambacache_jax.engine.sampler import sample
from mambacache_jax.host.drafts import HostDraft, NgramDraft
from mambacache_jax.layout import RoundShape
from mambacache_jax.models import Model
from mambacache_jax.models.speculate import Carried, advance_round, make_carried
from mambacache_jax.spec import Accepted, MTPDraft, StateMode
from mambacache_jax.spec.planner import DEVICES, plan_spec


class RoundProgram:
    """The round of one model and configuration, compiled once a shape.

    Attributes:
      host_draft: proposes on the host; None where the model's own head does.
      traces: how often a round was traced.
    """

    def __init__(
        self, model: Model, spec: SpecConfig, mode: StateMode, page_size: int, track_interval: int
    ) -> None:
        """See `Speculation`."""
        self.traces = 0
        self.host_draft: HostDraft | None = NgramDraft(runs=spec.topk) if spec.draft == "ngram" else None
        self._device_draft = _mtp(model, spec, page_size) if spec.draft == "mtp" else None
        self._model, self._depth = model, spec.depth
        self._mode: StateMode = mode
        self._page_size, self._interval = page_size, track_interval
        self._jitted = jax.jit(self._round, static_argnames="shape", donate_argnames=("pools", "carried"))

    def __call__(
        self, pools: Any, carried: Carried, plan: np.ndarray, *, shape: RoundShape
    ) -> tuple[Any, Carried, Accepted]:
        """Enqueues a round; `pools` and `carried` are donated."""
        return self._jitted(self._model.params, pools, carried, jax.device_put(plan), shape=shape)

    def _round(
        self, params: Any, pools: Any, carried: Carried, plan: Array, *, shape: RoundShape
    ) -> tuple[Any, Carried, Accepted]:
        self.traces += 1
        return advance_round(
            self._model,
            params,
            pools,
            carried,
            shape.unpack(plan),
            sample=sample,
            draft=self._device_draft,
            page_size=self._page_size,
            depth=self._depth,
            mode=self._mode,
            track_interval=self._interval,
        )


@functools.lru_cache(maxsize=32)
def round_program(
    model: Model, spec: SpecConfig, mode: StateMode, page_size: int, track_interval: int
) -> RoundProgram:
    """The one program of a model and configuration, so that engines of equal shapes share compiled rounds."""
    return RoundProgram(model, spec, mode, page_size, track_interval)


class Speculation:
    """The rounds of one engine, and what they hand on.

    Attributes:
      mode: how states of nodes are had.
      lazy: what a round accepts is folded in the next one.
      program: see `RoundProgram`.
    """

    def __init__(self, model: Model, spec: SpecConfig, cache: CacheConfig, config: EngineConfig) -> None:
        """Chooses the state mode; compiles nothing yet.

        Raises:
          ValueError: the model has no head for multi-token prediction, the trees asked for cannot be
            drafted, or a run could cross two track points.
        """
        if spec.depth > cache.track_interval:
            raise ValueError(
                f"SpecConfig.steps={spec.steps}: a run could cross two track points "
                f"{cache.track_interval} tokens apart. Raise CacheConfig.track_interval."
            )
        self.mode: StateMode = _state_mode(model, spec, cache, config)
        self.lazy = self.mode != "snapshot"
        self.program = round_program(model, spec, self.mode, cache.page_size, cache.track_interval)
        self._carried = make_carried(model, config.max_running + 1, spec.depth)

    def run(self, cache: HybridCache, plan: np.ndarray, shape: RoundShape) -> tuple[np.ndarray, np.ndarray]:
        """Runs a round and waits for it: tokens `[row, depth]` and the length of each row's run."""

        def program(pools: Any, plan: np.ndarray) -> tuple[Any, Accepted]:
            pools, self._carried, accepted = self.program(pools, self._carried, plan, shape=shape)
            return pools, accepted

        accepted = cache.run(program, plan)
        tokens, length = jax.device_get((accepted.tokens, accepted.length))
        return tokens, length


def _mtp(model: Model, spec: SpecConfig, page_size: int) -> MTPDraft:
    if model.mtp_layer is None:
        raise ValueError(f"{model.name} has no multi-token-prediction head; use SpecConfig(draft='ngram').")
    layer = sum(isinstance(of, AttentionSpec) for of in model.specs[: model.mtp_layer])
    return MTPDraft(model.mtp_step, model.logits, layer, page_size, spec.steps, spec.topk, spec.num_nodes)


def _state_mode(model: Model, spec: SpecConfig, cache: CacheConfig, config: EngineConfig) -> StateMode:
    if spec.state_mode != "auto":
        return spec.state_mode
    platform = jax.default_backend()
    return plan_spec(
        model.specs,
        num_rows=config.max_running,
        num_nodes=spec.num_nodes,
        depth=spec.depth,
        device=platform if platform in DEVICES else "h100",
        dtype=model.dtype,
        state_dtype=cache.state_dtype,
    ).mode
