"""Qwen3-Next and the text model of Qwen3.5: gated DeltaNet, and every few layers gated attention."""

import dataclasses
import functools
from typing import Literal

import numpy as np
from flax import nnx
from jaxtyping import Integer

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
from mambacache_jax.models.layers import Attention, Block, GatedDeltaNet, Linear, MoE, Router, SwiGLU
from mambacache_jax.models.layers.block import Mixer
from mambacache_jax.models.network import HybridLM

Name = Literal["qwen3_next", "qwen3_5"]

_KINDS = {"linear_attention": "gdn", "full_attention": "attention"}

_VISION = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "language_model_only",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """What the keys of a config say.

    Attributes:
      sparse: for each layer, whether it has experts.
    """

    name: Name
    ends: Ends
    kinds: tuple[str, ...]
    heads: Heads
    rope_base: float
    rotary_dim: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    sparse: tuple[bool, ...]
    mlp_size: int
    num_experts: int
    num_chosen: int
    expert_size: int
    shared_size: int
    normalised: bool


def parse(s: Settings, name: Name) -> Config:
    """Reads a config; that of a model for images and text holds the text's part apart."""
    tied = False
    if "text_config" in s:
        outer, s = s, Settings(s.take("text_config", kind=dict), f"{s.where}, 'text_config'")
        tied = outer.take("tie_word_embeddings", kind=bool, default=False)
        outer.pass_over(*_VISION)
        outer.finish()
    ends = take_ends(s, tied=tied, unit_offset=True)
    heads, rope = take_heads(s, ends.size), take_rope(s, share=0.25)
    count = s.take("num_hidden_layers", kind=int)
    interval = s.take("full_attention_interval", kind=int, default=4)
    pattern = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    num_experts = s.take("num_experts", kind=int, default=0)
    dense = set(s.take("mlp_only_layers", kind=list, default=[]))
    every = s.take("decoder_sparse_step", kind=int, default=1)
    s.expect("hidden_act", "silu")
    s.expect("attn_output_gate", True)
    s.expect("use_sliding_window", False)
    s.pass_over("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    config = Config(
        name=name,
        ends=ends,
        kinds=take_layer_kinds(s, "layer_types", names=_KINDS, default=pattern),
        heads=heads,
        rope_base=rope.base,
        rotary_dim=int(heads.head_dim * rope.share),
        num_key_heads=s.take("linear_num_key_heads", kind=int),
        num_value_heads=s.take("linear_num_value_heads", kind=int),
        key_dim=s.take("linear_key_head_dim", kind=int),
        value_dim=s.take("linear_value_head_dim", kind=int),
        conv_width=s.take("linear_conv_kernel_dim", kind=int, default=4),
        sparse=tuple(num_experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(count)),
        mlp_size=s.take("intermediate_size", kind=int, default=0),
        num_experts=num_experts,
        num_chosen=s.take("num_experts_per_tok", kind=int, default=0),
        expert_size=s.take("moe_intermediate_size", kind=int, default=0),
        shared_size=s.take("shared_expert_intermediate_size", kind=int, default=0),
        normalised=s.take("norm_topk_prob", kind=bool, default=True),
    )
    s.finish()
    return config


def network(c: Config, dtype: Dtype, rngs: nnx.Rngs) -> HybridLM:
    """A fresh network."""
    embedding, norm, head = c.ends.modules(dtype, rngs)
    size = c.ends.size

    def mixer(kind: str) -> Mixer:
        if kind == "gdn":
            return GatedDeltaNet(
                size,
                num_key_heads=c.num_key_heads,
                num_heads=c.num_value_heads,
                key_dim=c.key_dim,
                value_dim=c.value_dim,
                conv_width=c.conv_width,
                eps=c.ends.eps,
                dtype=dtype,
                rngs=rngs,
            )
        return Attention(
            size,
            **c.heads._asdict(),
            rope_base=c.rope_base,
            rotary_dim=c.rotary_dim,
            qk_norm=True,
            unit_offset=True,
            output_gate=True,
            eps=c.ends.eps,
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
            scores="softmax",
            normalised=c.normalised,
            rngs=rngs,
        )
        return MoE(
            size,
            c.expert_size,
            router,
            shared=SwiGLU(size, c.shared_size, dtype=dtype, rngs=rngs),
            shared_gate=Linear(size, 1, dtype=dtype, rngs=rngs),
            dtype=dtype,
            rngs=rngs,
        )

    blocks = [
        Block(size, mixer(kind), mlp(sparse), eps=c.ends.eps, unit_offset=True, dtype=dtype)
        for kind, sparse in zip(c.kinds, c.sparse, strict=True)
    ]
    return HybridLM(embedding, blocks, norm, head)


def rules(c: Config) -> Rules:
    """Where each parameter is in a checkpoint."""
    table = r.ends("model.embed_tokens", "model.norm", None if c.ends.tied else "lm_head")
    for index, (kind, sparse) in enumerate(zip(c.kinds, c.sparse, strict=True)):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        table |= r.block_norms(ours, f"{theirs}.input_layernorm", f"{theirs}.post_attention_layernorm")
        table |= _gdn(c, index) if kind == "gdn" else _attention(c, index)
        mlp = f"{theirs}.mlp"
        if not sparse:
            table |= r.swiglu(f"{ours}.mlp", mlp)
            continue
        maps = ["gate_proj", "up_proj"]
        fused = ("gate_up_proj", "down_proj")
        table |= r.router(f"{ours}.mlp", f"{mlp}.gate")
        table |= r.experts(f"{ours}.mlp", f"{mlp}.experts", c.num_experts, maps, "down_proj", fused)
        table |= r.swiglu(f"{ours}.mlp.shared", f"{mlp}.shared_expert")
        table |= r.linear(f"{ours}.mlp.shared_gate", f"{mlp}.shared_expert_gate")
    return table


def _attention(c: Config, index: int) -> Rules:
    """Gated attention: each head's rows of `q_proj` are its query and then its gate."""
    ours, theirs = f"layers.{index}.mixer", f"model.layers.{index}.self_attn"
    q, k, v = r.sections(
        [2 * c.heads.num_heads * c.heads.head_dim] + [c.heads.num_kv_heads * c.heads.head_dim] * 2
    )
    q = q.reshape(c.heads.num_heads, 2, c.heads.head_dim)
    rows = np.concatenate([q[:, 0].ravel(), k, v, q[:, 1].ravel()])
    names = [f"{theirs}.{name}_proj" for name in ("q", "k", "v")]
    table = r.linear(f"{ours}.qkv", *names, bias=c.heads.bias, rows=rows)
    table |= r.linear(f"{ours}.out", f"{theirs}.o_proj", bias=c.heads.bias)
    for name in ("q_norm", "k_norm"):
        table |= r.as_is(f"{ours}.{name}.weight", f"{theirs}.{name}.weight")
    return table


def _gdn(c: Config, index: int) -> Rules:
    """Gated DeltaNet, whose maps Qwen3-Next interleaves by key head and Qwen3.5 keeps apart."""
    ours, theirs = f"layers.{index}.mixer", f"model.layers.{index}.linear_attn"
    if c.name == "qwen3_next":
        names, rows = ["in_proj_qkvz", "in_proj_ba"], _by_section(c)
    else:
        names, rows = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"], None
    table = r.linear(f"{ours}.in_proj", *(f"{theirs}.{name}" for name in names), rows=rows)
    table |= r.linear(f"{ours}.out_proj", f"{theirs}.out_proj")
    same = {
        "conv.weight": "conv1d.weight",
        "a_log": "A_log",
        "dt_bias": "dt_bias",
        "norm.weight": "norm.weight",
    }
    for here, there in same.items():
        table |= r.as_is(f"{ours}.{here}", f"{theirs}.{there}")
    return table


def _by_section(c: Config) -> Integer[np.ndarray, " row"]:
    """The rows of `[q k v z of each key head | b a of each key head]` in the order q, k, v, z, b, a."""
    group = c.num_value_heads // c.num_key_heads
    widths = [c.key_dim, c.key_dim, group * c.value_dim, group * c.value_dim]
    qkvz, ba = r.sections([c.num_key_heads * sum(widths), 2 * c.num_value_heads])
    parts = np.split(qkvz.reshape(c.num_key_heads, -1), np.cumsum(widths)[:-1], axis=1)
    parts += np.split(ba.reshape(c.num_key_heads, -1), 2, axis=1)
    return np.concatenate([part.ravel() for part in parts])


def _family(name: Name) -> Family:
    return Family(
        functools.partial(parse, name=name),
        network,
        rules,
        # The text model inside one for images and text.
        renames=((r"^model\.language_model\.", "model."), (r"^language_model\.", "")),
        ignored=(r"mtp\..*", r"model\.visual\..*", r"visual\..*"),
    )


QWEN3_NEXT = _family("qwen3_next")
QWEN3_5 = _family("qwen3_5")
