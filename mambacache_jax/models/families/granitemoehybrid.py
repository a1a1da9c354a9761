"""Granite 4: Mamba-2 and attention in turn, scaled residuals, and dense or mixture-of-experts layers."""

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
    take_layer_kinds,
    take_rope,
)
from mambacache_jax.models.families.mamba import MambaSizes, take_mamba
from mambacache_jax.models.layers import Attention, Block, MoE, Router, SwiGLU
from mambacache_jax.models.layers.block import Mixer
from mambacache_jax.models.network import HybridLM

_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What the keys of a config say; `rope_base` None means no positions."""

    ends: Ends
    kinds: tuple[str, ...]
    heads: Heads
    mamba: MambaSizes
    rope_base: float | None
    shared_size: int
    num_experts: int
    num_chosen: int
    expert_size: int
    embedding_multiplier: float
    logits_scaling: float
    residual_multiplier: float
    attention_multiplier: float


def parse(s: Settings) -> Config:
    """Reads a config."""
    ends = take_ends(s)
    rope = take_rope(s)
    s.expect("position_embedding_type", "rope", "nope")
    s.expect("hidden_act", "silu")
    s.expect("normalization_function", "rmsnorm")
    s.pass_over("init_method")
    config = Config(
        ends=ends,
        kinds=take_layer_kinds(s, "layer_types", "layers_block_type", names=_KINDS),
        heads=take_heads(s, ends.size),
        mamba=take_mamba(s, ends.size),
        rope_base=rope.base if s.take("position_embedding_type", kind=str, default="") == "rope" else None,
        shared_size=s.take("shared_intermediate_size", kind=int),
        num_experts=s.take("num_local_experts", kind=int, default=0),
        num_chosen=s.take("num_experts_per_tok", kind=int, default=0),
        expert_size=s.take("intermediate_size", kind=int, default=0),
        embedding_multiplier=s.take("embedding_multiplier", kind=float, default=1.0),
        logits_scaling=s.take("logits_scaling", kind=float, default=1.0),
        residual_multiplier=s.take("residual_multiplier", kind=float, default=1.0),
        attention_multiplier=s.take("attention_multiplier", kind=float, default=1.0),
    )
    s.finish()
    return config


def network(c: Config, dtype: Dtype, rngs: nnx.Rngs) -> HybridLM:
    """A fresh network."""
    embedding, norm, head = c.ends.modules(dtype, rngs)

    def mixer(kind: str) -> Mixer:
        if kind == "mamba":
            return c.mamba.module(c.ends.size, c.ends.eps, dtype, rngs)
        return Attention(
            c.ends.size,
            **c.heads._asdict(),
            scale=c.attention_multiplier,
            rope_base=c.rope_base,
            dtype=dtype,
            rngs=rngs,
        )

    def mlp() -> SwiGLU | MoE:
        shared = SwiGLU(c.ends.size, c.shared_size, dtype=dtype, rngs=rngs)
        if not c.num_experts:
            return shared
        router = Router(
            c.ends.size,
            num_experts=c.num_experts,
            num_chosen=c.num_chosen,
            scores="softmax_of_best",
            rngs=rngs,
        )
        return MoE(c.ends.size, c.expert_size, router, shared=shared, dtype=dtype, rngs=rngs)

    blocks = [
        Block(
            c.ends.size,
            mixer(kind),
            mlp(),
            multiplier=c.residual_multiplier,
            eps=c.ends.eps,
            dtype=dtype,
        )
        for kind in c.kinds
    ]
    return HybridLM(
        embedding,
        blocks,
        norm,
        head,
        embedding_multiplier=c.embedding_multiplier,
        logits_multiplier=1 / c.logits_scaling,
    )


def rules(c: Config) -> Rules:
    """Where each parameter is in a checkpoint."""
    table = r.ends("model.embed_tokens", "model.norm", None if c.ends.tied else "lm_head")
    for index, kind in enumerate(c.kinds):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        table |= r.block_norms(ours, f"{theirs}.input_layernorm", f"{theirs}.post_attention_layernorm")
        if kind == "mamba":
            table |= c.mamba.rules(f"{ours}.mixer", f"{theirs}.mamba")
        else:
            table |= r.attention(f"{ours}.mixer", f"{theirs}.self_attn", bias=c.heads.bias)
        shared = f"{ours}.mlp.shared" if c.num_experts else f"{ours}.mlp"
        table |= r.linear(f"{shared}.gate_up", f"{theirs}.shared_mlp.input_linear")
        table |= r.linear(f"{shared}.down", f"{theirs}.shared_mlp.output_linear")
        if c.num_experts:
            moe = f"{theirs}.block_sparse_moe"
            table |= r.router(f"{ours}.mlp", f"{moe}.router.layer")
            table[f"{ours}.mlp.first"] = r.Join((f"{moe}.input_linear.weight",))
            table[f"{ours}.mlp.last"] = r.Join((f"{moe}.output_linear.weight",))
    return table


FAMILY = Family(parse, network, rules)
