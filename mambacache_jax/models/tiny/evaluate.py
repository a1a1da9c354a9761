"""Losses of a byte model on text: bits per byte, and how often its drafts are what it would say itself."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from mambacache_jax.models.model import Model
from mambacache_jax.models.plain import PlainContext

DRAFTS = 2
"""Steps of the multi-token-prediction head that are trained and measured."""


def all_logits(
    model: Model, params: Any, text: Int32[Array, "row window"]
) -> list[Float32[Array, "row length vocab"]]:
    """Logits of the model and of each draft step, with the true tokens fed in.

    Args:
      model: a model with a multi-token-prediction head.
      params: its parameters.
      text: windows of `length + DRAFTS + 1` tokens.

    Returns:
      `1 + DRAFTS` arrays: entry `s` at `t` is for token `t + 1 + s`.
    """
    assert model.mtp_layer is not None
    layer = model.mtp_layer
    num_rows, length = text.shape[0], text.shape[1] - DRAFTS - 1
    ctx = PlainContext(model.specs, num_rows, length)
    hidden = model.hidden(params, text[:, :length].reshape(-1), ctx)
    outputs = [hidden]
    for step in range(1, DRAFTS + 1):
        tokens = text[:, step : step + length].reshape(-1)
        hidden = model.mtp_step(
            params, tokens, hidden, ctx.positions, lambda q, scale: ctx.read(layer, q, scale)
        )
        outputs.append(hidden)
    return [model.logits(params, h).reshape(num_rows, length, -1) for h in outputs]


def losses(logits: list[Array], text: Int32[Array, "row window"]) -> Float32[Array, " step"]:
    """Mean bits per byte of the model and of each draft step."""
    length = logits[0].shape[1]
    bits = []
    for step, predicted in enumerate(logits):
        target = text[:, step + 1 : step + 1 + length, None]
        log_p = jax.nn.log_softmax(predicted, axis=-1)
        bits.append(-jnp.take_along_axis(log_p, target, axis=-1).mean() / math.log(2))
    return jnp.stack(bits)


def agreement(logits: list[Array]) -> Float32[Array, " draft"]:
    """Share of positions where draft step `s` has the same best token as the model itself `s` later."""
    best = [jnp.argmax(step, axis=-1) for step in logits]
    length = best[0].shape[1]
    same = [best[s][:, : length - s] == best[0][:, s:] for s in range(1, len(best))]
    return jnp.stack([match.astype(jnp.float32).mean() for match in same])


@functools.partial(jax.jit, static_argnames="model")
def _measure(model: Model, params: Any, text: Array) -> tuple[Array, Array]:
    logits = all_logits(model, params, text)
    return losses(logits, text), agreement(logits)


def evaluate(model: Model, params: Any, text: np.ndarray, *, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Bits per byte `[1 + DRAFTS]` and agreement `[DRAFTS]` over windows, `rows` at a time.

    Args:
      model: what to measure.
      params: its parameters.
      text: `[window, length + DRAFTS + 1]` int32, a multiple of `rows` windows.
      rows: windows of one batch.

    Raises:
      ValueError: the windows do not fill whole batches.
    """
    if len(text) == 0 or len(text) % rows:
        raise ValueError(f"evaluate: {len(text)} windows do not fill batches of {rows}.")
    batches = [_measure(model, params, jnp.asarray(text[i : i + rows])) for i in range(0, len(text), rows)]
    return (
        np.mean([np.asarray(bits) for bits, _ in batches], axis=0),
        np.mean([np.asarray(share) for _, share in batches], axis=0),
    )
