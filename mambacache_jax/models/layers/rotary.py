"""Rotary position embedding, which turns channel `i` with channel `i + dim / 2`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def rotate(
    x: Float[Array, "token head head_dim"],
    positions: Int32[Array, " token"],
    *,
    base: float,
    rotary_dim: int | None = None,
) -> Float[Array, "token head head_dim"]:
    """Turns the first `rotary_dim` channels of each head (None: all) by the token's position.

    The angle of pair `i` is `position * base ** (-2 i / rotary_dim)`; arithmetic is float32.
    """
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    half = dim // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency[None, None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    low, high = x[..., :half].astype(jnp.float32), x[..., half:dim].astype(jnp.float32)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., dim:]], axis=-1)
