"""The network of the built-in model."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from mambacache_jax.config import LayerSpec
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers import (
    Attend,
    Attention,
    Block,
    Embedding,
    FrozenAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    Linear,
    Mamba2,
    MTPBlock,
    RMSNorm,
    SwiGLU,
)
from mambacache_jax.models.layers.block import Mixer


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    """Sizes of the network; the defaults are those of the weights that come with the package.

    Attributes:
      layers: the mixer of each layer: "mamba2", "gdn", "kda" or "attention".
      size: channels of the residual.
      mlp_size: channels inside an MLP.
      num_heads, num_kv_heads, head_dim: of attention.
      mamba_heads, mamba_head_dim, mamba_state_dim, mamba_groups: of Mamba-2.
      delta_key_heads, delta_heads, delta_dim: of gated DeltaNet; KDA has `delta_heads` of `delta_dim`.
    """

    layers: tuple[str, ...] = ("mamba2", "gdn", "attention", "kda", "mamba2", "attention")
    size: int = 128
    mlp_size: int = 352
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    mamba_heads: int = 8
    mamba_head_dim: int = 32
    mamba_state_dim: int = 32
    mamba_groups: int = 2
    delta_key_heads: int = 2
    delta_heads: int = 4
    delta_dim: int = 32


class TinyLM(nnx.Module):
    """Embedding, blocks, a last norm, a head, and a multi-token-prediction block over the last attention.

    Attributes:
      specs: what each layer keeps.
      mtp_layer: the attention layer whose K and V the multi-token-prediction block reads.
    """

    def __init__(self, config: TinyConfig, rngs: nnx.Rngs) -> None:
        """Draws fresh weights."""
        size, out_scale = config.size, (2 * len(config.layers)) ** -0.5
        self.embedding = Embedding(256, size, rngs=rngs)
        blocks = [
            Block(
                size,
                _mixer(kind, config, rngs),
                SwiGLU(size, config.mlp_size, out_scale=out_scale, rngs=rngs),
            )
            for kind in config.layers
        ]
        self.layers = nnx.List(blocks)
        self.norm = RMSNorm(size)
        self.head = Linear(size, 256, rngs=rngs)
        attention = FrozenAttention(
            size, num_heads=config.num_heads, head_dim=config.head_dim, out_scale=out_scale, rngs=rngs
        )
        self.mtp = MTPBlock(
            size, attention=attention, mlp_size=config.mlp_size, out_scale=out_scale, rngs=rngs
        )
        self.specs: tuple[LayerSpec, ...] = tuple(block.mixer.spec for block in blocks)
        self.mtp_layer = max(i for i, kind in enumerate(config.layers) if kind == "attention")

    def hidden(self, tokens: Int32[Array, " token"], ctx: Context) -> Float[Array, "token size"]:
        """See `Model.hidden`."""
        x = self.embedding(tokens)
        for index, block in enumerate(self.layers):
            x = block(x, ctx, index)
        return self.norm(x)

    def logits(self, hidden: Float[Array, "*batch size"]) -> Float32[Array, "*batch vocab"]:
        """See `Model.logits`."""
        flat = self.head(hidden.reshape(-1, hidden.shape[-1]))
        return flat.reshape(*hidden.shape[:-1], -1).astype(jnp.float32)

    def mtp_step(
        self,
        tokens: Int32[Array, " row"],
        hidden: Float[Array, "row size"],
        positions: Int32[Array, " row"],
        attend: Attend,
    ) -> Float[Array, "row size"]:
        """See `Model.mtp_step`."""
        return self.mtp(self.embedding(tokens), hidden, positions, attend)


def _mixer(kind: str, config: TinyConfig, rngs: nnx.Rngs) -> Mixer:
    out_scale = (2 * len(config.layers)) ** -0.5
    if kind == "attention":
        return Attention(
            config.size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            out_scale=out_scale,
            rngs=rngs,
        )
    if kind == "mamba2":
        return Mamba2(
            config.size,
            num_heads=config.mamba_heads,
            head_dim=config.mamba_head_dim,
            state_dim=config.mamba_state_dim,
            num_groups=config.mamba_groups,
            out_scale=out_scale,
            rngs=rngs,
        )
    if kind == "gdn":
        return GatedDeltaNet(
            config.size,
            num_key_heads=config.delta_key_heads,
            num_heads=config.delta_heads,
            key_dim=config.delta_dim,
            value_dim=config.delta_dim,
            out_scale=out_scale,
            rngs=rngs,
        )
    if kind == "kda":
        return KimiDeltaAttention(
            config.size,
            num_heads=config.delta_heads,
            head_dim=config.delta_dim,
            out_scale=out_scale,
            rngs=rngs,
        )
    raise ValueError(f"TinyConfig: unknown layer {kind!r}.")
