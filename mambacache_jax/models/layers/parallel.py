"""Attention and a recurrent mixer side by side on one input."""

from flax import nnx
from jaxtyping import Array, Float

from mambacache_jax.config import LayerSpec
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers.attention import Attention
from mambacache_jax.models.layers.mamba2 import Mamba2


class Parallel(nnx.Module):
    """The sum of an attention layer and a Mamba-2 layer, as in Falcon-H1.

    Attributes:
      specs: what the context keeps: for attention, then for Mamba-2.
    """

    def __init__(
        self,
        attention: Attention,
        mamba: Mamba2,
        *,
        attention_multipliers: tuple[float, float] = (1.0, 1.0),
        mamba_multipliers: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Wraps the two; the multipliers are factors on the input and on the output of each."""
        self.specs: tuple[LayerSpec, ...] = (attention.spec, mamba.spec)
        self.attention, self.mamba = attention, mamba
        self.attention_multipliers, self.mamba_multipliers = attention_multipliers, mamba_multipliers

    def __call__(self, x: Float[Array, "token size"], ctx: Context, layer: int) -> Float[Array, "token size"]:
        """Runs both; attention is layer `layer` of the model's specs, Mamba-2 the next."""
        before, after = self.attention_multipliers
        attended = self.attention(x * before, ctx, layer) * after
        before, after = self.mamba_multipliers
        return attended + self.mamba(x * before, ctx, layer + 1) * after
