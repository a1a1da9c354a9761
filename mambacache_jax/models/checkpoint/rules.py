"""How a parameter here is made of a checkpoint's tensors, whose names and layouts are others.

Checkpoints keep a map as `[out, in]` and one tensor a projection; here a map is `[in, out]`, and maps of the
same input are one. A rule names the tensors that a parameter is joined from; tables of rules are keyed by
the parameter's path in the module, as `weights.names` gives it.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer


@dataclasses.dataclass(frozen=True, eq=False)
class Join:
    """Tensors joined along their first axis.

    Attributes:
      names: the checkpoint's tensors, in order.
      rows: which of the joined rows to keep, and in what order; None: all, as they are.
      transposed: swap the last two axes at the end (`[out, in]` becomes `[in, out]`).
    """

    names: tuple[str, ...]
    rows: Integer[np.ndarray, " row"] | None = None
    transposed: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """One `Join` an expert, stacked along a new first axis."""

    parts: tuple[Join, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
    """The first of some rules whose tensors are all there; families are written in more than one way."""

    options: tuple[Join | Stack, ...]


Rule = Join | Stack | OneOf
Rules = dict[str, Rule]


def linear(
    ours: str, *theirs: str, bias: bool = False, rows: Integer[np.ndarray, " row"] | None = None
) -> Rules:
    """A `Linear` of the maps `theirs` side by side."""
    rules: Rules = {f"{ours}.weight": Join(tuple(f"{name}.weight" for name in theirs), rows)}
    if bias:
        rules[f"{ours}.bias"] = Join(tuple(f"{name}.bias" for name in theirs), rows, transposed=False)
    return rules


def as_is(ours: str, *theirs: str) -> Rules:
    """A vector, a table or a conv's taps: not transposed, and joined along the first axis."""
    return {ours: Join(theirs, transposed=False)}


def ends(embedding: str, norm: str, head: str | None) -> Rules:
    """The embedding, the last norm, and the head unless it is tied to the embedding."""
    rules = as_is("embedding.weight", f"{embedding}.weight") | as_is("norm.weight", f"{norm}.weight")
    return rules if head is None else rules | linear("head", head)


def block_norms(ours: str, mixer_norm: str | None, mlp_norm: str | None) -> Rules:
    """The norms of a `Block`."""
    pairs = {"mixer_norm": mixer_norm, "mlp_norm": mlp_norm}
    return {
        f"{ours}.{name}.weight": Join((f"{theirs}.weight",), transposed=False)
        for name, theirs in pairs.items()
        if theirs is not None
    }


def attention(ours: str, theirs: str, *, bias: bool = False) -> Rules:
    """An `Attention` from q, k, v and o projections."""
    maps = [f"{theirs}.{name}_proj" for name in ("q", "k", "v")]
    return linear(f"{ours}.qkv", *maps, bias=bias) | linear(f"{ours}.out", f"{theirs}.o_proj", bias=bias)


def mamba2(
    ours: str, theirs: str, *, in_bias: bool, out_bias: bool, conv_bias: bool, norm: bool = True
) -> Rules:
    """A `Mamba2`, which checkpoints keep as it is here."""
    rules = linear(f"{ours}.in_proj", f"{theirs}.in_proj", bias=in_bias)
    rules |= linear(f"{ours}.out_proj", f"{theirs}.out_proj", bias=out_bias)
    rules |= as_is(f"{ours}.conv.weight", f"{theirs}.conv1d.weight")
    if conv_bias:
        rules |= as_is(f"{ours}.conv.bias", f"{theirs}.conv1d.bias")
    if norm:
        rules |= as_is(f"{ours}.norm.weight", f"{theirs}.norm.weight")
    for here, there in (("a_log", "A_log"), ("dt_bias", "dt_bias"), ("skip", "D")):
        rules |= as_is(f"{ours}.{here}", f"{theirs}.{there}")
    return rules


def swiglu(ours: str, theirs: str, *, bias: bool = False) -> Rules:
    """A `SwiGLU` from gate, up and down projections."""
    gate_up = linear(f"{ours}.gate_up", f"{theirs}.gate_proj", f"{theirs}.up_proj", bias=bias)
    return gate_up | linear(f"{ours}.down", f"{theirs}.down_proj", bias=bias)


def squared_relu(ours: str, theirs: str, *, bias: bool = False) -> Rules:
    """A `SquaredReLU` from up and down projections."""
    up = linear(f"{ours}.up", f"{theirs}.up_proj", bias=bias)
    return up | linear(f"{ours}.down", f"{theirs}.down_proj", bias=bias)


def router(ours: str, theirs: str, *, bias: bool = False) -> Rules:
    """A `Router` from one map and, where it has a bias, DeepSeek's correction of its scores."""
    rules = linear(f"{ours}.router", theirs)
    return rules | as_is(f"{ours}.router.bias", f"{theirs}.e_score_correction_bias") if bias else rules


def experts(
    ours: str, theirs: str, num_experts: int, first: Sequence[str], last: str, fused: tuple[str, str]
) -> Rules:
    """The experts of a `MoE`, one tensor each or all in one.

    Args:
      ours: the layer.
      theirs: what holds the experts.
      num_experts: how many there are.
      first: an expert's maps from its input, gate first where it has one.
      last: its map back.
      fused: the two tensors `[expert, out, in]` that a checkpoint may have instead.
    """

    def stacked(names: Sequence[str]) -> Stack:
        return Stack(
            tuple(
                Join(tuple(f"{theirs}.{expert}.{name}.weight" for name in names))
                for expert in range(num_experts)
            )
        )

    return {
        f"{ours}.first": OneOf((stacked(first), Join((f"{theirs}.{fused[0]}",)))),
        f"{ours}.last": OneOf((stacked([last]), Join((f"{theirs}.{fused[1]}",)))),
    }


def sections(sizes: Sequence[int]) -> list[Integer[np.ndarray, " row"]]:
    """The rows of each section, for sections of `sizes` rows one after another."""
    bounds = np.cumsum([0, *sizes])
    return [np.arange(start, end) for start, end in itertools.pairwise(bounds)]
