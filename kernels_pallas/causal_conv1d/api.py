"""The depthwise causal convolution over ragged rows, with the last inputs carried as a window.

Tap `width - 1` is the present token. The window holds the `width - 1` raw inputs before a row's first
token, oldest first. Sums run in float32, tap by tap, in one order for prefill and decode.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kernels_pallas.blocks import Blocks


def causal_conv1d(
    x: Float[Array, "block token channel"],
    weight: Float[Array, "channel width"],
    bias: Float[Array, " channel"] | None,
    window: Float[Array, "row window channel"],
    blocks: Blocks,
) -> tuple[
    Float[Array, "block token channel"],
    Float[Array, "row window channel"],
    Float[Array, "row export window channel"],
]:
    """Convolves every row, starting from its window. There is no activation.

    Args:
      x: the raw inputs of each block.
      weight: one filter a channel, oldest tap first.
      bias: added to each output, or None.
      window: the `width - 1` inputs before each row's first token, in the dtype of `x`.
      blocks: how the rows are cut.

    Returns:
      The outputs, 0 at padding tokens; the window after each row's last token (its own window for a row
      without blocks); and the windows at the exports asked for, 0 where none was.

    Raises:
      ValueError: the window does not fit the weight's width, or its dtype is not that of `x`.
    """
    _check(x, weight, window)
    num_tokens, past = x.shape[1], weight.shape[1] - 1
    valid = blocks.valid(num_tokens)[:, :, None]
    x = jnp.where(valid, x, jnp.zeros((), x.dtype))
    inputs = jnp.concatenate([_history(x, window, blocks), x], axis=1)
    taps = [inputs[:, tap : tap + num_tokens] for tap in range(past + 1)]
    out = jnp.where(valid, _filter(taps, weight, bias), jnp.zeros((), x.dtype))

    ends = jnp.concatenate([blocks.length[:, None], blocks.export], axis=1)
    index = ends[:, :, None] + jnp.arange(past, dtype=jnp.int32)[None, None, :]
    windows = inputs[jnp.arange(x.shape[0])[:, None, None], index]
    source, found = _last_block(blocks, window.shape[0])
    zeros = jnp.zeros((window.shape[0], blocks.export.shape[1], past, x.shape[2]), x.dtype)
    before = jnp.concatenate([window[:, None], zeros], axis=1)
    after = windows[source, jnp.arange(source.shape[1])[None, :]]
    after = jnp.where(found[:, :, None, None], after, before)
    return out, after[:, 0], after[:, 1:]


def causal_conv1d_step(
    x: Float[Array, "row channel"],
    weight: Float[Array, "channel width"],
    bias: Float[Array, " channel"] | None,
    window: Float[Array, "row window channel"],
) -> tuple[Float[Array, "row channel"], Float[Array, "row window channel"]]:
    """Convolves one token of each row; the same arithmetic as `causal_conv1d`.

    Returns:
      The outputs and the windows moved on by one token.

    Raises:
      ValueError: the window does not fit the weight's width, or its dtype is not that of `x`.
    """
    _check(x, weight, window)
    inputs = jnp.concatenate([window, x[:, None]], axis=1)
    out = _filter([inputs[:, tap] for tap in range(inputs.shape[1])], weight, bias)
    return out, inputs[:, 1:]


def _check(x, weight, window):
    if window.shape[1] != weight.shape[1] - 1:
        raise ValueError(
            "causal_conv1d: "
            f"the window must hold width - 1 = {weight.shape[1] - 1} inputs, got {window.shape[1]}."
        )
    if window.dtype != x.dtype:
        raise ValueError(f"causal_conv1d: the window is {window.dtype}, but x is {x.dtype}; make them equal.")


def _filter(taps, weight, bias):
    """Sum of `taps[i] * weight[:, i]`, oldest tap first, in float32; then the dtype of the taps."""
    weight = weight.astype(jnp.float32)
    lead = (1,) * (taps[0].ndim - 1)
    total = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32).reshape(*lead, -1)
    for tap, x in enumerate(taps):
        total = total + x.astype(jnp.float32) * weight[:, tap].reshape(*lead, -1)
    return total.astype(taps[0].dtype)


def _history(x, window, blocks: Blocks) -> Float[Array, "block window channel"]:
    """The `width - 1` inputs before each block: of the row's earlier blocks, then of its window."""
    num_blocks, num_tokens, channels = x.shape
    past = window.shape[1]
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    start = jnp.maximum.accumulate(jnp.where(blocks.first, block, 0))
    token = jnp.arange(-past, 0, dtype=jnp.int32)[None, :] + ((block - start) * num_tokens)[:, None]
    of_row = x.reshape(-1, channels)[jnp.maximum(start[:, None] * num_tokens + token, 0)]
    row = jnp.minimum(blocks.row, window.shape[0] - 1)
    of_window = window[row[:, None], jnp.clip(token + past, 0, past - 1)]
    return jnp.where((token >= 0)[:, :, None], of_row, of_window)


def _last_block(blocks: Blocks, num_rows: int) -> tuple[Int32[Array, "row end"], Bool[Array, "row end"]]:
    """For each row, the block that holds its last token and each export, and whether there is one."""
    live = jnp.concatenate([blocks.length[:, None], blocks.export], axis=1) > 0
    row = jnp.arange(num_rows, dtype=jnp.int32)
    hit = (blocks.row[None, :] == row[:, None])[:, :, None] & live[None]
    block = jnp.arange(blocks.row.shape[0], dtype=jnp.int32)[None, :, None]
    return jnp.max(jnp.where(hit, block, 0), axis=1), jnp.any(hit, axis=1)
