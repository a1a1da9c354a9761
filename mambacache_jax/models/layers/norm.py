"""Norms over the last axis. The arithmetic is float32, the result in the input's dtype."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """`x / rms(x)` times a weight.

    Attributes:
      weight: one factor a channel; with `unit_offset` the factor is `1 + weight` (Qwen3-Next's blocks).
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-6,
        unit_offset: bool = False,
        dtype: jnp.dtype | type = jnp.float32,
    ) -> None:
        """Starts with all factors 1."""
        self.weight = nnx.Param(jnp.zeros((size,), dtype) if unit_offset else jnp.ones((size,), dtype))
        self.eps, self.unit_offset = eps, unit_offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        """Normalises the last axis."""
        weight = self.weight[...].astype(jnp.float32)
        weight = 1.0 + weight if self.unit_offset else weight
        y = _unit_rms(x.astype(jnp.float32), self.eps)
        return (y * _along_last(weight, x)).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """The norm at the end of a recurrent layer, multiplied by a gate before or after normalising.

    Mamba-2 gates first and then normalises each group of channels; gated DeltaNet (silu) and KDA (sigmoid)
    normalise each head and then gate.

    Attributes:
      weight: one factor a channel.
    """

    def __init__(
        self,
        size: int,
        *,
        num_groups: int = 1,
        gate: Literal["silu", "sigmoid"] = "silu",
        gate_first: bool = False,
        eps: float = 1e-6,
        dtype: jnp.dtype | type = jnp.float32,
    ) -> None:
        """Starts with all factors 1; `num_groups` parts of the channels are normalised each on its own."""
        if size % num_groups:
            raise ValueError(f"GatedRMSNorm: {size} channels do not divide into {num_groups} groups.")
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.num_groups, self.gate, self.gate_first, self.eps = num_groups, gate, gate_first, eps

    def __call__(
        self, x: Float[Array, "*batch size"], gate: Float[Array, "*batch size"]
    ) -> Float[Array, "*batch size"]:
        """Normalises and gates `x`; the result has the dtype of `gate`."""
        activation: Callable[[Array], Array] = jax.nn.silu if self.gate == "silu" else jax.nn.sigmoid
        factor = activation(gate.astype(jnp.float32))
        y = x.astype(jnp.float32)
        if self.gate_first:
            y = y * factor
        y = _unit_rms(y.reshape(*x.shape[:-1], self.num_groups, -1), self.eps)
        y = y.reshape(x.shape) * _along_last(self.weight[...].astype(jnp.float32), x)
        if not self.gate_first:
            y = y * factor
        return y.astype(gate.dtype)


def l2_normalised(x: Float[Array, "*batch size"], *, eps: float = 1e-6) -> Float[Array, "*batch size"]:
    """`x / sqrt(sum(x^2) + eps)` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def _unit_rms(x: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _along_last(weight: Array, x: Array) -> Array:
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape)
