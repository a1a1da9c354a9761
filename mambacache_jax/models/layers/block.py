"""One layer of a language model: a mixer, an MLP or both, each on a norm, added to the residual."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mambacache_jax.config import LayerSpec
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers.attention import Attention
from mambacache_jax.models.layers.gdn import GatedDeltaNet
from mambacache_jax.models.layers.kda import KimiDeltaAttention
from mambacache_jax.models.layers.latent import LatentAttention
from mambacache_jax.models.layers.mamba2 import Mamba2
from mambacache_jax.models.layers.mlp import SquaredReLU, SwiGLU
from mambacache_jax.models.layers.moe import MoE
from mambacache_jax.models.layers.norm import RMSNorm
from mambacache_jax.models.layers.parallel import Parallel

Mixer = Attention | LatentAttention | Mamba2 | GatedDeltaNet | KimiDeltaAttention | Parallel
MLP = SwiGLU | SquaredReLU | MoE


class Block(nnx.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`; either may be absent.

    Attributes:
      specs: what the context keeps for the mixer, one entry a mixer where several run side by side.
    """

    def __init__(
        self,
        size: int,
        mixer: Mixer | None,
        mlp: MLP | None,
        *,
        multiplier: float = 1.0,
        eps: float = 1e-6,
        unit_offset: bool = False,
        dtype: jnp.dtype | type = jnp.float32,
    ) -> None:
        """Wraps the two; `multiplier` is a factor on both before they are added (Granite)."""

        def norm() -> RMSNorm:
            return RMSNorm(size, eps=eps, unit_offset=unit_offset, dtype=dtype)

        self.specs: tuple[LayerSpec, ...] = () if mixer is None else specs_of(mixer)
        self.multiplier = multiplier
        self.mixer_norm = None if mixer is None else norm()
        self.mixer = mixer
        self.mlp_norm = None if mlp is None else norm()
        self.mlp = mlp

    def __call__(self, x: Float[Array, "token size"], ctx: Context, layer: int) -> Float[Array, "token size"]:
        """Runs the layer; `layer` is the index of its first mixer in the model's specs."""
        if self.mixer is not None and self.mixer_norm is not None:
            x = x + self.mixer(self.mixer_norm(x), ctx, layer) * self.multiplier
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x)) * self.multiplier
        return x


def specs_of(mixer: Mixer) -> tuple[LayerSpec, ...]:
    """What the context keeps for a mixer."""
    return mixer.specs if isinstance(mixer, Parallel) else (mixer.spec,)
