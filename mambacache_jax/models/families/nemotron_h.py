"""Nemotron-H: a block is one mixer or one feed-forward layer; Mamba-2 and attention without positions."""

import dataclasses

from flax import nnx

from mambacache_jax.models.checkpoint import rules as r
from mambacache_jax.models.checkpoint.rules import Rules
from mambacache_jax.models.checkpoint.settings import Settings
from mambacache_jax.models.families.family import Dtype, Ends, Family, Heads, take_ends, take_heads
from mambacache_jax.models.families.mamba import MambaSizes
from mambacache_jax.models.layers import Attention, Block, Linear, MoE, Router, SquaredReLU
from mambacache_jax.models.network import HybridLM

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What the keys of a config say; `latent_size` 0 means that experts take the model's channels."""

    ends: Ends
    kinds: tuple[str, ...]
    heads: Heads
    mamba: MambaSizes
    mlp_size: int
    mlp_bias: bool
    num_experts: int
    num_chosen: int
    num_groups: int
    num_chosen_groups: int
    normalised: bool
    factor: float
    expert_size: int
    shared_size: int
    latent_size: int


def parse(s: Settings) -> Config:
    """Reads a config.

    The limits of dt (`time_step_min` and `_max`) are those of its first values; serving programs, this one
    too, do not clamp it.
    """
    ends = take_ends(s, eps="layer_norm_epsilon")
    s.expect("mlp_hidden_act", "relu2")
    s.expect("tie_word_embeddings", False)
    s.expect("attention_bias", False)
    s.expect("mamba_hidden_act", "silu")
    s.expect("sliding_window")
    s.expect("residual_in_fp32", False)
    s.expect("time_step_limit", [0.0, float("inf")])
    s.pass_over("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "chunk_size", "expand")
    s.pass_over("rms_norm_eps", "norm_eps", "rope_theta", "partial_rotary_factor")  # there are no positions
    s.pass_over("moe_shared_expert_overlap", "mamba_proj_bias")
    s.pass_over("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    bias = s.take("use_bias", kind=bool, default=False)
    size = s.take("moe_shared_expert_intermediate_size", kind=int, default=0)
    s.expect("n_shared_experts", 0, 1)
    config = Config(
        ends=ends,
        kinds=_kinds(s),
        heads=take_heads(s, ends.size),
        mamba=MambaSizes(
            num_heads=s.take("mamba_num_heads", kind=int),
            head_dim=s.take("mamba_head_dim", kind=int),
            state_dim=s.take("ssm_state_size", kind=int),
            num_groups=s.take("n_groups", "mamba_n_groups", kind=int),
            conv_width=s.take("conv_kernel", "mamba_d_conv", kind=int, default=4),
            conv_bias=s.take("use_conv_bias", "mamba_conv_bias", kind=bool, default=True),
            in_bias=bias,
            out_bias=bias,
        ),
        mlp_size=s.take("intermediate_size", kind=int),
        mlp_bias=s.take("mlp_bias", kind=bool, default=False),
        num_experts=s.take("n_routed_experts", kind=int, default=0),
        num_chosen=s.take("num_experts_per_tok", kind=int, default=0),
        num_groups=s.take("n_group", kind=int, default=1),
        num_chosen_groups=s.take("topk_group", kind=int, default=1),
        normalised=s.take("norm_topk_prob", kind=bool, default=True),
        factor=s.take("routed_scaling_factor", kind=float, default=1.0),
        expert_size=s.take("moe_intermediate_size", kind=int, default=0),
        shared_size=size,
        latent_size=s.take("moe_latent_size", kind=int, default=0),
    )
    s.finish()
    return config


def _kinds(s: Settings) -> tuple[str, ...]:
    """The kind of each layer, from the list of names or from one letter a layer."""
    pattern = s.take("hybrid_override_pattern", kind=str, default="")
    if unknown := sorted(set(pattern) - _PATTERN.keys()):
        raise ValueError(
            f"{s.where}: 'hybrid_override_pattern' holds {unknown}; supported are {sorted(_PATTERN)}."
        )
    listed = s.take(
        "layers_block_type", "layer_types", kind=list, default=[_PATTERN[letter] for letter in pattern]
    )
    if unknown := sorted({str(kind) for kind in listed} - _KINDS.keys()):
        raise ValueError(f"{s.where}: 'layers_block_type' holds {unknown}; supported are {sorted(_KINDS)}.")
    count = s.take("num_hidden_layers", kind=int, default=len(listed))
    if not listed or count != len(listed):
        raise ValueError(f"{s.where}: {count} layers, and the kinds of {len(listed)}.")
    return tuple(_KINDS[kind] for kind in listed)


def network(c: Config, dtype: Dtype, rngs: nnx.Rngs) -> HybridLM:
    """A fresh network."""
    embedding, norm, head = c.ends.modules(dtype, rngs)
    size = c.ends.size

    def moe() -> MoE:
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
        narrow = widen = None
        if c.latent_size:
            narrow = Linear(size, c.latent_size, bias=c.mlp_bias, dtype=dtype, rngs=rngs)
            widen = Linear(c.latent_size, size, bias=c.mlp_bias, dtype=dtype, rngs=rngs)
        return MoE(
            c.latent_size or size,
            c.expert_size,
            router,
            gated=False,
            shared=SquaredReLU(size, c.shared_size, bias=c.mlp_bias, dtype=dtype, rngs=rngs),
            narrow=narrow,
            widen=widen,
            dtype=dtype,
            rngs=rngs,
        )

    def block(kind: str) -> Block:
        mixer = mlp = None
        if kind == "mamba":
            mixer = c.mamba.module(size, c.ends.eps, dtype, rngs)
        elif kind == "attention":
            mixer = Attention(size, **c.heads._asdict(), rope_base=None, dtype=dtype, rngs=rngs)
        elif kind == "mlp":
            mlp = SquaredReLU(size, c.mlp_size, bias=c.mlp_bias, dtype=dtype, rngs=rngs)
        else:
            mlp = moe()
        return Block(size, mixer, mlp, eps=c.ends.eps, dtype=dtype)

    return HybridLM(embedding, [block(kind) for kind in c.kinds], norm, head)


def rules(c: Config) -> Rules:
    """Where each parameter is in a checkpoint."""
    table = r.ends("model.embeddings", "model.norm_f", None if c.ends.tied else "lm_head")
    for index, kind in enumerate(c.kinds):
        ours, theirs = f"layers.{index}", f"model.layers.{index}.mixer"
        norm = f"model.layers.{index}.norm"
        if kind == "mamba":
            table |= r.block_norms(ours, norm, None) | c.mamba.rules(f"{ours}.mixer", theirs)
        elif kind == "attention":
            table |= r.block_norms(ours, norm, None)
            table |= r.attention(f"{ours}.mixer", theirs, bias=c.heads.bias)
        elif kind == "mlp":
            table |= r.block_norms(ours, None, norm)
            table |= r.squared_relu(f"{ours}.mlp", theirs, bias=c.mlp_bias)
        else:
            table |= r.block_norms(ours, None, norm) | _moe(c, f"{ours}.mlp", theirs)
    return table


def _moe(c: Config, ours: str, theirs: str) -> Rules:
    fused = ("up_proj", "down_proj")
    table = r.router(ours, f"{theirs}.gate", bias=True)
    table |= r.experts(ours, f"{theirs}.experts", c.num_experts, ["up_proj"], "down_proj", fused)
    table |= r.squared_relu(f"{ours}.shared", f"{theirs}.shared_experts", bias=c.mlp_bias)
    if c.latent_size:
        table |= r.linear(f"{ours}.narrow", f"{theirs}.fc1_latent_proj", bias=c.mlp_bias)
        table |= r.linear(f"{ours}.widen", f"{theirs}.fc2_latent_proj", bias=c.mlp_bias)
    return table


FAMILY = Family(
    parse,
    network,
    rules,
    renames=((r"^backbone\.", "model."), (r"^model\.embedding\.", "model.embeddings.")),
    ignored=(r"mtp\..*",),
)
