"""Linear maps and the embedding."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32


class Linear(nnx.Module):
    """`x @ weight + bias`; products of float32 are float32 on every platform.

    Attributes:
      weight: `[in, out]`.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool = False,
        scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Draws weights with standard deviation `scale / sqrt(in_size)`; a bias starts at zero."""
        std = scale / math.sqrt(in_size)
        weight = std * jax.random.normal(rngs.params(), (in_size, out_size), jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "token in"]) -> Float[Array, "token out"]:
        """Maps each token."""
        y = jnp.matmul(x, self.weight[...], precision=jax.lax.Precision.HIGHEST)
        return y if self.bias is None else y + self.bias[...][None]


class Embedding(nnx.Module):
    """A table of one vector a token id."""

    def __init__(
        self, vocab_size: int, size: int, *, dtype: jnp.dtype | type = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        """Draws unit-variance vectors."""
        weight = jax.random.normal(rngs.params(), (vocab_size, size), jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype))

    def __call__(self, tokens: Int32[Array, " token"]) -> Float[Array, "token size"]:
        """Looks the tokens up; ids outside the table are clamped to its ends."""
        return self.weight[...].at[tokens].get(mode="clip")
