"""Falcon-H1: attention and Mamba-2 side by side in every layer, and a multiplier at every turn."""

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
from mambacache_jax.models.layers import Attention, Block, Parallel, SwiGLU
from mambacache_jax.models.network import HybridLM


@dataclasses.dataclass(frozen=True)
class Config:
    """What the keys of a config say; `attention_` and `mamba_multipliers` are for input and output."""

    ends: Ends
    num_layers: int
    heads: Heads
    rope_base: float
    mamba: MambaSizes
    mlp_size: int
    mlp_bias: bool
    embedding_multiplier: float
    logits_multiplier: float
    key_multiplier: float
    attention_multipliers: tuple[float, float]
    mamba_multipliers: tuple[float, float]
    mlp_multipliers: tuple[float, float]


def parse(s: Settings) -> Config:
    """Reads a config."""

    def multiplier(name: str) -> float:
        return s.take(f"{name}_multiplier", kind=float, default=1.0)

    def several(name: str, count: int) -> tuple[float, ...]:
        values = s.take(name, kind=list, default=[1.0] * count)
        if len(values) != count:
            raise ValueError(f"{s.where}: {name!r} must hold {count} numbers, got {values}.")
        return tuple(float(value) for value in values)

    ends = take_ends(s)
    s.expect("hidden_act", "silu")
    s.expect("mamba_use_mlp", True)
    s.pass_over("mlp_expansion_factor", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank")
    z, v, b, c, dt = several("ssm_multipliers", 5)
    gate, down = several("mlp_multipliers", 2)
    mamba = take_mamba(s, ends.size)._replace(
        norm=s.take("mamba_rms_norm", kind=bool, default=False),
        gate_first=not s.take("mamba_norm_before_gate", kind=bool, default=True),
        multipliers=(z, v, b, c, dt),
    )
    config = Config(
        ends=ends,
        num_layers=s.take("num_hidden_layers", kind=int),
        heads=take_heads(s, ends.size),
        rope_base=take_rope(s).base,
        mamba=mamba,
        mlp_size=s.take("intermediate_size", kind=int),
        mlp_bias=s.take("mlp_bias", kind=bool, default=False),
        embedding_multiplier=multiplier("embedding"),
        logits_multiplier=multiplier("lm_head"),
        key_multiplier=multiplier("key"),
        attention_multipliers=(multiplier("attention_in"), multiplier("attention_out")),
        mamba_multipliers=(multiplier("ssm_in"), multiplier("ssm_out")),
        mlp_multipliers=(gate, down),
    )
    s.finish()
    return config


def network(c: Config, dtype: Dtype, rngs: nnx.Rngs) -> HybridLM:
    """A fresh network."""
    embedding, norm, head = c.ends.modules(dtype, rngs)
    size = c.ends.size

    def mixer() -> Parallel:
        attention = Attention(
            size,
            **c.heads._asdict(),
            rope_base=c.rope_base,
            key_multiplier=c.key_multiplier,
            dtype=dtype,
            rngs=rngs,
        )
        return Parallel(
            attention,
            c.mamba.module(size, c.ends.eps, dtype, rngs),
            attention_multipliers=c.attention_multipliers,
            mamba_multipliers=c.mamba_multipliers,
        )

    def mlp() -> SwiGLU:
        return SwiGLU(
            size, c.mlp_size, bias=c.mlp_bias, multipliers=c.mlp_multipliers, dtype=dtype, rngs=rngs
        )

    blocks = [Block(size, mixer(), mlp(), eps=c.ends.eps, dtype=dtype) for _ in range(c.num_layers)]
    return HybridLM(
        embedding,
        blocks,
        norm,
        head,
        embedding_multiplier=c.embedding_multiplier,
        logits_multiplier=c.logits_multiplier,
    )


def rules(c: Config) -> Rules:
    """Where each parameter is in a checkpoint."""
    table = r.ends("model.embed_tokens", "model.final_layernorm", None if c.ends.tied else "lm_head")
    for index in range(c.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        table |= r.block_norms(ours, f"{theirs}.input_layernorm", f"{theirs}.pre_ff_layernorm")
        table |= r.attention(f"{ours}.mixer.attention", f"{theirs}.self_attn", bias=c.heads.bias)
        table |= c.mamba.rules(f"{ours}.mixer.mamba", f"{theirs}.mamba")
        table |= r.swiglu(f"{ours}.mlp", f"{theirs}.feed_forward", bias=c.mlp_bias)
    return table


FAMILY = Family(parse, network, rules)
