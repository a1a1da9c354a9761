"""The network of the built-in model."""

import dataclasses

from flax import nnx

from mambacache_jax.models.layers import (
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
from mambacache_jax.models.network import HybridLM


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


class TinyLM(HybridLM):
    """The hybrid with a multi-token-prediction block over its last attention layer."""

    def __init__(self, config: TinyConfig, rngs: nnx.Rngs) -> None:
        """Draws fresh weights."""
        size, out_scale = config.size, (2 * len(config.layers)) ** -0.5
        embedding = Embedding(256, size, rngs=rngs)
        blocks = [
            Block(
                size,
                _mixer(kind, config, rngs),
                SwiGLU(size, config.mlp_size, out_scale=out_scale, rngs=rngs),
            )
            for kind in config.layers
        ]
        head = Linear(size, 256, rngs=rngs)
        attention = FrozenAttention(
            size, num_heads=config.num_heads, head_dim=config.head_dim, out_scale=out_scale, rngs=rngs
        )
        mtp = MTPBlock(size, attention=attention, mlp_size=config.mlp_size, out_scale=out_scale, rngs=rngs)
        mtp_layer = max(i for i, kind in enumerate(config.layers) if kind == "attention")
        super().__init__(embedding, blocks, RMSNorm(size), head, mtp=mtp, mtp_layer=mtp_layer)


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
