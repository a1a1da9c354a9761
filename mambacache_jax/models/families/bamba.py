"""Bamba: Mamba-2 with a few attention layers, whose positions turn half of a head's channels."""

import dataclasses

from flax import nnx

from mambacache_jax.models.checkpoint import rules as r
from mambacache_jax.models.checkpoint.rules import Rules
from mambacache_jax.models.checkpoint.settings import Settings
from mambacache_jax.models.families.family import (
    Dtype,
    Ends,
    Family,
    Heads,
    take_ends,
    take_heads,
    take_rope,
)
from mambacache_jax.models.families.mamba import MambaSizes, take_mamba
from mambacache_jax.models.layers import Attention, Block, SwiGLU
from mambacache_jax.models.layers.block import Mixer
from mambacache_jax.models.network import HybridLM


@dataclasses.dataclass(frozen=True)
class Config:
    """What the keys of a config say; `attention` holds the indices of the attention layers."""

    ends: Ends
    num_layers: int
    attention: frozenset[int]
    heads: Heads
    rope_base: float
    rotary_dim: int
    mamba: MambaSizes
    mlp_size: int
    mlp_bias: bool


def parse(s: Settings) -> Config:
    """Reads a config."""
    ends = take_ends(s)
    heads, rope = take_heads(s, ends.size), take_rope(s, share=0.5)
    s.expect("hidden_act", "silu")
    config = Config(
        ends=ends,
        num_layers=s.take("num_hidden_layers", kind=int),
        attention=frozenset(s.take("attn_layer_indices", kind=list, default=[])),
        heads=heads,
        rope_base=rope.base,
        rotary_dim=s.take("attn_rotary_emb", kind=int, default=int(heads.head_dim * rope.share)),
        mamba=take_mamba(s, ends.size),
        mlp_size=s.take("intermediate_size", kind=int),
        mlp_bias=s.take("mlp_bias", kind=bool, default=False),
    )
    s.finish()
    return config


def network(c: Config, dtype: Dtype, rngs: nnx.Rngs) -> HybridLM:
    """A fresh network."""
    embedding, norm, head = c.ends.modules(dtype, rngs)

    def mixer(index: int) -> Mixer:
        if index not in c.attention:
            return c.mamba.module(c.ends.size, c.ends.eps, dtype, rngs)
        return Attention(
            c.ends.size,
            **c.heads._asdict(),
            rope_base=c.rope_base,
            rotary_dim=c.rotary_dim,
            dtype=dtype,
            rngs=rngs,
        )

    blocks = [
        Block(
            c.ends.size,
            mixer(index),
            SwiGLU(c.ends.size, c.mlp_size, bias=c.mlp_bias, dtype=dtype, rngs=rngs),
            eps=c.ends.eps,
            dtype=dtype,
        )
        for index in range(c.num_layers)
    ]
    return HybridLM(embedding, blocks, norm, head)


def rules(c: Config) -> Rules:
    """Where each parameter is in a checkpoint."""
    table = r.ends("model.embed_tokens", "model.final_layernorm", None if c.ends.tied else "lm_head")
    for index in range(c.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        table |= r.block_norms(ours, f"{theirs}.input_layernorm", f"{theirs}.pre_ff_layernorm")
        if index in c.attention:
            table |= r.attention(f"{ours}.mixer", f"{theirs}.self_attn", bias=c.heads.bias)
        else:
            table |= c.mamba.rules(f"{ours}.mixer", f"{theirs}.mamba")
        table |= r.swiglu(f"{ours}.mlp", f"{theirs}.feed_forward", bias=c.mlp_bias)
    return table


FAMILY = Family(parse, network, rules)
