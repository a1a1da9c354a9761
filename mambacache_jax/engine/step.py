"""One step as a compiled program: tables, layers, head and sampling over donated pools."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from mambacache_jax.engine.sampler import sample
from mambacache_jax.layout import PlanShape
from mambacache_jax.models import Model
from mambacache_jax.models.step import advance, advance_in_blocks


class StepOutput(NamedTuple):
    """What a step leaves on the device besides the pools.

    Attributes:
      tokens: int32 `[decode_rows + extend_rows]`: decode rows first; garbage where nothing was sampled.
      logits: float32 of the sampled positions, in the same order; None unless asked for.
      all_logits: float32 of every token of the blocks; None unless asked for.
    """

    tokens: Int32[Array, " row"]
    logits: Float[Array, "row vocab"] | None
    all_logits: Float[Array, "token vocab"] | None


class StepProgram:
    """The step of one model, compiled once a plan shape.

    The model's graph definition is closed over, not passed: a call flattens weights and pools only.

    Attributes:
      traces: how often the step was traced, that is, how many programs there are.
    """

    def __init__(self, model: Model, page_size: int, deterministic: bool, return_logits: bool) -> None:
        """See `EngineConfig` for the flags."""
        self.traces = 0
        self._model, self._page_size = model, page_size
        self._deterministic, self._return_logits = deterministic, return_logits
        self._jitted = jax.jit(
            self._step, static_argnames=("shape", "all_logits"), donate_argnames=("pools",)
        )

    def __call__(
        self, pools: Any, plan: np.ndarray, *, shape: PlanShape, all_logits: bool
    ) -> tuple[Any, StepOutput]:
        """Enqueues a step; `pools` is donated, `plan` is the step's one transfer to the device."""
        on_device = jax.device_put(plan)
        return self._jitted(self._model.params, pools, on_device, shape=shape, all_logits=all_logits)

    def lower(
        self,
        pools: Any,
        *,
        shape: PlanShape,
        all_logits: bool = False,
        sharding: jax.sharding.Sharding | None = None,
    ) -> jax.stages.Lowered:
        """The step lowered for a shape, to compile ahead of time.

        Args:
          pools: arrays or shapes; only their shapes are used.
          shape: the plan's layout.
          all_logits: as in a call.
          sharding: where all arguments lie; a device of another platform compiles for that.
        """

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        plan = placed(jax.ShapeDtypeStruct((shape.size,), jnp.int32))
        params, pools = jax.tree.map(placed, (self._model.params, pools))
        return self._jitted.lower(params, pools, plan, shape=shape, all_logits=all_logits)

    def _step(
        self, params: Any, pools: Any, plan: Array, *, shape: PlanShape, all_logits: bool
    ) -> tuple[Any, StepOutput]:
        self.traces += 1
        model, fields = self._model, shape.unpack(plan)
        decode_rows = shape.decode_rows
        # Index of each sampled position among the step's tokens: all decode rows, then each row's last.
        sampled = jnp.concatenate([jnp.arange(decode_rows, dtype=jnp.int32), decode_rows + fields["last"]])
        every = None
        if self._deterministic:
            pools, every = advance_in_blocks(model, params, pools, fields, self._page_size)
            logits = every[sampled]
        else:
            pools, hidden = advance(model, params, pools, fields, self._page_size)
            if all_logits:
                every = model.logits(params, hidden)[decode_rows:]
            logits = model.logits(params, hidden[sampled])
        tokens = sample(
            logits,
            jnp.concatenate([fields["decode_sampling"], fields["sampling"]]),
            jnp.concatenate([fields["decode_position"] + 1, fields["end"]]),
        )
        rows = jnp.concatenate([fields["decode_row"], jnp.where(fields["samples"] != 0, fields["row"], 0)])
        last_token = pools.table.last_token.at[rows].set(tokens, mode="promise_in_bounds")
        pools = pools._replace(table=pools.table._replace(last_token=last_token))
        output = StepOutput(tokens, logits if self._return_logits else None, every if all_logits else None)
        return pools, output


@functools.lru_cache(maxsize=32)
def step_program(model: Model, page_size: int, deterministic: bool, return_logits: bool) -> StepProgram:
    """The one program of a model and mode, so that engines of equal shapes share compiled steps."""
    return StepProgram(model, page_size, deterministic, return_logits)
