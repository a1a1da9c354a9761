"""The gated feed-forward layer."""

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
        out_scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """`out_scale` multiplies the first weights of the map back into the residual."""
        self.gate_up = Linear(size, 2 * hidden_size, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden_size, size, scale=out_scale, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "token size"]) -> Float[Array, "token size"]:
        """Maps each token."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)
