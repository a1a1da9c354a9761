"""Kimi-Linear: Kimi Delta Attention, every few layers latent attention, and mixtures of experts."""

import dataclasses

import numpy as np
from flax import nnx

from mambacache_jax.models.checkpoint import rules as r
from mambacache_jax.models.checkpoint.rules import Rules
from mambacache_jax.models.checkpoint.settings import Settings
from mambacache_jax.models.families.family import Dtype, Ends, Family, take_ends, take_layer_kinds
from mambacache_jax.models.layers import Block, KimiDeltaAttention, LatentAttention, MoE, Router, SwiGLU
from mambacache_jax.models.layers.block import Mixer
from mambacache_jax.models.network import HybridLM

_KINDS = {"linear_attention": "kda", "full_attention": "attention"}
_LATENT_EPS = 1e-6  # the reference code gives the latent's norm no other


@dataclasses.dataclass(frozen=True)
class Config:
    """What the keys of a config say; `sparse` says of each layer whether it has experts."""

    ends: Ends
    kinds: tuple[str, ...]
    sparse: tuple[bool, ...]
    num_heads: int
    latent_dim: int
    key_dim: int
    shared_dim: int
    value_dim: int
    delta_heads: int
    delta_dim: int
    conv_width: int
    mlp_size: int
    num_experts: int
    num_chosen: int
    num_groups: int
    num_chosen_groups: int
    normalised: bool
    factor: float
    expert_size: int
    num_shared: int


def parse(s: Settings) -> Config:
    """Reads a config, also with the keys that hubs have (`linear_attn_config`, layers counted from 1)."""
    ends = take_ends(s)
    count = s.take("num_hidden_layers", kind=int)
    inner = Settings(s.take("linear_attn_config", kind=dict, default={}), f"{s.where}, 'linear_attn_config'")
    full = set(inner.take("full_attn_layers", kind=list, default=[]))
    inner.pass_over("kda_layers")
    pattern = ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
    first = s.take("first_k_dense_replace", kind=int, default=1)
    mlps = take_layer_kinds(
        s,
        "mlp_layer_types",
        names={"dense": "dense", "sparse": "sparse"},
        default=["dense" if i < first else "sparse" for i in range(count)],
    )
    s.expect("hidden_act", "silu")
    s.expect("tie_word_embeddings", False)
    s.expect("q_lora_rank")
    s.expect("attention_bias", False)
    s.expect("mla_use_nope", True)
    s.expect("moe_router_activation_func", "sigmoid")
    s.expect("moe_layer_freq", 1)
    s.expect("use_grouped_topk", True)
    s.expect("num_nextn_predict_layers", 0)
    # No positions are rotated, and the heads' widths are given by other keys.
    s.pass_over(
        "head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters", "num_key_value_heads"
    )
    config = Config(
        ends=ends,
        kinds=take_layer_kinds(s, "layer_types", names=_KINDS, default=pattern),
        sparse=tuple(kind == "sparse" for kind in mlps),
        num_heads=s.take("num_attention_heads", kind=int),
        latent_dim=s.take("kv_lora_rank", kind=int),
        key_dim=s.take("qk_nope_head_dim", kind=int),
        shared_dim=s.take("qk_rope_head_dim", kind=int),
        value_dim=s.take("v_head_dim", kind=int),
        delta_heads=s.take(
            "linear_num_heads", kind=int, default=inner.take("num_heads", kind=int, default=32)
        ),
        delta_dim=s.take("linear_head_dim", kind=int, default=inner.take("head_dim", kind=int, default=128)),
        conv_width=s.take(
            "linear_conv_kernel_dim",
            kind=int,
            default=inner.take("short_conv_kernel_size", kind=int, default=4),
        ),
        mlp_size=s.take("intermediate_size", kind=int),
        num_experts=s.take("num_experts", "num_local_experts", kind=int),
        num_chosen=s.take("num_experts_per_token", "num_experts_per_tok", kind=int),
        num_groups=s.take("num_expert_group", "n_group", kind=int, default=1),
        num_chosen_groups=s.take("topk_group", kind=int, default=1),
        normalised=s.take("moe_renormalize", "norm_topk_prob", kind=bool, default=True),
        factor=s.take("routed_scaling_factor", kind=float, default=1.0),
        expert_size=s.take("moe_intermediate_size", kind=int),
        num_shared=s.take("num_shared_experts", "n_shared_experts", kind=int, default=1),
    )
    inner.finish()
    s.finish()
    return config


def network(c: Config, dtype: Dtype, rngs: nnx.Rngs) -> HybridLM:
    """A fresh network."""
    embedding, norm, head = c.ends.modules(dtype, rngs)
    size = c.ends.size

    def mixer(kind: str) -> Mixer:
        if kind == "kda":
            return KimiDeltaAttention(
                size,
                num_heads=c.delta_heads,
                head_dim=c.delta_dim,
                conv_width=c.conv_width,
                eps=c.ends.eps,
                dtype=dtype,
                rngs=rngs,
            )
        return LatentAttention(
            size,
            num_heads=c.num_heads,
            latent_dim=c.latent_dim,
            key_dim=c.key_dim,
            shared_dim=c.shared_dim,
            value_dim=c.value_dim,
            eps=_LATENT_EPS,
            dtype=dtype,
            rngs=rngs,
        )

    def mlp(sparse: bool) -> SwiGLU | MoE:
        if not sparse:
            return SwiGLU(size, c.mlp_size, dtype=dtype, rngs=rngs)
        router = Router(
            size,
            num_experts=c.num_experts,
            num_chosen=c.num_chosen,
            scores="sigmoid",
            normalised=c.normalised,
            bias=True,
            num_groups=c.num_groups,
            num_chosen_groups=c.num_chosen_groups,
            factor=c.factor,
            rngs=rngs,
        )
        shared = SwiGLU(size, c.expert_size * c.num_shared, dtype=dtype, rngs=rngs)
        return MoE(size, c.expert_size, router, shared=shared, dtype=dtype, rngs=rngs)

    blocks = [
        Block(size, mixer(kind), mlp(sparse), eps=c.ends.eps, dtype=dtype)
        for kind, sparse in zip(c.kinds, c.sparse, strict=True)
    ]
    return HybridLM(embedding, blocks, norm, head)


def rules(c: Config) -> Rules:
    """Where each parameter is in a checkpoint."""
    table = r.ends("model.embed_tokens", "model.norm", None if c.ends.tied else "lm_head")
    for index, (kind, sparse) in enumerate(zip(c.kinds, c.sparse, strict=True)):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        table |= r.block_norms(ours, f"{theirs}.input_layernorm", f"{theirs}.post_attention_layernorm")
        mixer, attention, mlp = f"{ours}.mixer", f"{theirs}.self_attn", f"{theirs}.mlp"
        table |= _kda(mixer, attention) if kind == "kda" else _latent(c, mixer, attention)
        if not sparse:
            table |= r.swiglu(f"{ours}.mlp", mlp)
            continue
        fused = ("gate_up_proj", "down_proj")
        table |= r.router(f"{ours}.mlp", f"{mlp}.gate", bias=True)
        table |= r.experts(f"{ours}.mlp", f"{mlp}.experts", c.num_experts, ["w1", "w3"], "w2", fused)
        table |= r.swiglu(f"{ours}.mlp.shared", f"{mlp}.shared_experts")
    return table


def _kda(ours: str, theirs: str) -> Rules:
    maps = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    table = r.linear(f"{ours}.in_proj", *(f"{theirs}.{name}" for name in maps))
    table |= r.as_is(f"{ours}.conv.weight", *(f"{theirs}.{name}_conv1d.weight" for name in ("q", "k", "v")))
    table |= r.linear(f"{ours}.decay", f"{theirs}.f_b_proj") | r.linear(f"{ours}.gate", f"{theirs}.g_b_proj")
    table |= r.as_is(f"{ours}.a_log", f"{theirs}.A_log") | r.as_is(f"{ours}.dt_bias", f"{theirs}.dt_bias")
    table |= r.as_is(f"{ours}.norm.weight", f"{theirs}.o_norm.weight")
    return table | r.linear(f"{ours}.out_proj", f"{theirs}.o_proj")


def _latent(c: Config, ours: str, theirs: str) -> Rules:
    table = r.linear(f"{ours}.query", f"{theirs}.q_proj") | r.linear(f"{ours}.out", f"{theirs}.o_proj")
    table |= r.linear(f"{ours}.down", f"{theirs}.kv_a_proj_with_mqa")
    table |= r.as_is(f"{ours}.norm.weight", f"{theirs}.kv_a_layernorm.weight")
    # Each head's rows are its key's and then its value's.
    rows = np.arange(c.num_heads * (c.key_dim + c.value_dim)).reshape(c.num_heads, -1)
    for name, part in (("key_up", rows[:, : c.key_dim]), ("value_up", rows[:, c.key_dim :])):
        table[f"{ours}.{name}"] = r.Join((f"{theirs}.kv_b_proj.weight",), part.ravel(), transposed=False)
    return table


FAMILY = Family(parse, network, rules, renames=((r"\.block_sparse_moe\.", ".mlp."),))
