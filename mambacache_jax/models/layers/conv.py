"""The weights of a short causal conv; the context holds its window."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mambacache_jax.models.context import Context


class ShortConv(nnx.Module):
    """A depthwise causal conv and a silu.

    Attributes:
      weight: `[channel, width]`; tap `width - 1` is the present token.
    """

    def __init__(
        self, channels: int, width: int, *, bias: bool, dtype: jnp.dtype | type = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        """Draws taps with standard deviation `1 / sqrt(width)`; a bias starts at zero."""
        weight = jax.random.normal(rngs.params(), (channels, width), jnp.float32) / math.sqrt(width)
        self.weight = nnx.Param(weight.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), dtype)) if bias else None

    def __call__(
        self, x: Float[Array, "token channel"], ctx: Context, layer: int
    ) -> Float[Array, "token channel"]:
        """Convolves each channel along its sequence."""
        bias = None if self.bias is None else self.bias[...]
        return jax.nn.silu(ctx.conv(layer, x, self.weight[...], bias))
