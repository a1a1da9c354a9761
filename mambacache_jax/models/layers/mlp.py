"""Feed-forward layers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mambacache_jax.models.layers.linear import Linear


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`; `gate` and `up` are one map, gate first."""

    def __init__(
        self,
        size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        multipliers: tuple[float, float] = (1.0, 1.0),
        out_scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer.

        Args:
          size: channels of the model.
          hidden_size: channels between the maps.
          bias: both maps have biases.
          multipliers: factors on the gate before its silu, and on the output (Falcon-H1).
          out_scale: multiplies the first weights of the map back into the residual.
          dtype: of parameters and activations.
          rngs: seeds.
        """
        self.multipliers = multipliers
        self.gate_up = Linear(size, 2 * hidden_size, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden_size, size, bias=bias, scale=out_scale, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "token size"]) -> Float[Array, "token size"]:
        """Maps each token."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate * self.multipliers[0]) * up) * self.multipliers[1]


class SquaredReLU(nnx.Module):
    """`down(relu(up(x))^2)`, the feed-forward layer of Nemotron-H."""

    def __init__(
        self,
        size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer; `bias` gives both maps biases."""
        self.up = Linear(size, hidden_size, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden_size, size, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "token size"]) -> Float[Array, "token size"]:
        """Maps each token."""
        return self.down(jnp.square(jax.nn.relu(self.up(x))))
