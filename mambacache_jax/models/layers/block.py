"""One layer of a language model: a mixer and an MLP, each normalised before and added to the residual."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mambacache_jax.models.context import Context
from mambacache_jax.models.layers.attention import Attention
from mambacache_jax.models.layers.gdn import GatedDeltaNet
from mambacache_jax.models.layers.kda import KimiDeltaAttention
from mambacache_jax.models.layers.mamba2 import Mamba2
from mambacache_jax.models.layers.mlp import SwiGLU
from mambacache_jax.models.layers.norm import RMSNorm

Mixer = Attention | Mamba2 | GatedDeltaNet | KimiDeltaAttention


class Block(nnx.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        size: int,
        mixer: Mixer,
        mlp: SwiGLU,
        *,
        eps: float = 1e-6,
        unit_offset: bool = False,
        dtype: jnp.dtype | type = jnp.float32,
    ) -> None:
        """Wraps the two; `unit_offset` is that of `RMSNorm`."""
        self.mixer_norm = RMSNorm(size, eps=eps, unit_offset=unit_offset, dtype=dtype)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(size, eps=eps, unit_offset=unit_offset, dtype=dtype)
        self.mlp = mlp

    def __call__(self, x: Float[Array, "token size"], ctx: Context, layer: int) -> Float[Array, "token size"]:
        """Runs the layer; `layer` is its index in the model's specs."""
        x = x + self.mixer(self.mixer_norm(x), ctx, layer)
        return x + self.mlp(self.mlp_norm(x))
