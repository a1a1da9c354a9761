"""What a family of checkpoints says about itself, and what families share in reading a config."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast, get_args

import jax.numpy as jnp
from flax import nnx

from mambacache_jax.config import StateDtype
from mambacache_jax.models.checkpoint.rules import Rules
from mambacache_jax.models.checkpoint.settings import Settings
from mambacache_jax.models.layers import Embedding, Linear, RMSNorm
from mambacache_jax.models.network import HybridLM

Dtype = jnp.dtype | type


class Family(NamedTuple):
    """How checkpoints of one architecture become a network.

    Attributes:
      parse: the config's keys to the family's own frozen dataclass; every key is taken, or refused.
      network: a fresh network of that config.
      rules: how each of its parameters is made of the checkpoint's tensors.
      renames: pairs of a pattern and its replacement that bring tensor names to the ones `rules` uses.
      ignored: patterns of tensor names that may be there and are not used.
    """

    parse: Callable[[Settings], Any]
    network: Callable[[Any, Dtype, nnx.Rngs], HybridLM]
    rules: Callable[[Any], Rules]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()


class Ends(NamedTuple):
    """The two ends of a network, embedding, last norm and head, and what else a config says of the whole.

    Attributes:
      vocab_size: rows of the embedding and of the head.
      size: channels of the residual.
      eps: of the norms.
      tied: the head is the embedding's table.
      max_context: most tokens of a sequence.
      state_dtype: how recurrent states are to be stored.
      unit_offset: norms multiply by `1 + weight`.
    """

    vocab_size: int
    size: int
    eps: float
    tied: bool
    max_context: int
    state_dtype: StateDtype
    unit_offset: bool = False

    def modules(self, dtype: Dtype, rngs: nnx.Rngs) -> tuple[Embedding, RMSNorm, Linear | None]:
        """Embedding, last norm, and head or None."""
        embedding = Embedding(self.vocab_size, self.size, dtype=dtype, rngs=rngs)
        norm = RMSNorm(self.size, eps=self.eps, unit_offset=self.unit_offset, dtype=dtype)
        head = None if self.tied else Linear(self.size, self.vocab_size, dtype=dtype, rngs=rngs)
        return embedding, norm, head


def take_ends(
    s: Settings, *, tied: bool = False, eps: str = "rms_norm_eps", unit_offset: bool = False
) -> Ends:
    """The keys of the ends; `tied` is what an absent `tie_word_embeddings` means."""
    return Ends(
        vocab_size=s.take("vocab_size", kind=int),
        size=s.take("hidden_size", kind=int),
        eps=s.take(eps, kind=float),
        tied=s.take("tie_word_embeddings", kind=bool, default=tied),
        max_context=s.take("max_position_embeddings", "model_max_length", kind=int),
        state_dtype=_take_state_dtype(s),
        unit_offset=unit_offset,
    )


def _take_state_dtype(s: Settings) -> StateDtype:
    """The dtype of recurrent states, under Qwen3.5's key or Nemotron-H's; float32 where neither is there."""
    found = s.take("mamba_ssm_dtype", "mamba_ssm_cache_dtype", kind=str, default="float32")
    if found not in get_args(StateDtype):
        supported = " or ".join(map(repr, get_args(StateDtype)))
        raise ValueError(f"{s.where}: recurrent states in {found!r}; supported is {supported}.")
    return cast(StateDtype, found)


class Heads(NamedTuple):
    """Attention heads: query heads, KV heads, channels of each, and whether the maps have biases."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool


def take_heads(s: Settings, size: int) -> Heads:
    """The keys of grouped-query attention; without `head_dim` the heads share `size` channels."""
    num_heads = s.take("num_attention_heads", kind=int)
    return Heads(
        num_heads=num_heads,
        num_kv_heads=s.take("num_key_value_heads", kind=int, default=num_heads),
        head_dim=s.take("head_dim", "attention_head_dim", kind=int, default=size // num_heads),
        bias=s.take("attention_bias", kind=bool, default=False),
    )


class Rope(NamedTuple):
    """Rotary positions: the base of the angles, and the share of a head's channels that turns."""

    base: float
    share: float


def take_rope(s: Settings, *, base: float = 10_000.0, share: float = 1.0) -> Rope:
    """The keys of rotary positions, new (`rope_parameters`) and old; scaled kinds are refused."""
    base = s.take("rope_theta", kind=float, default=base)
    share = s.take("partial_rotary_factor", kind=float, default=share)
    for name in ("rope_parameters", "rope_scaling"):
        values = s.take(name, kind=dict, default={})
        inner = Settings(values, f"{s.where}, {name!r}")
        inner.expect("rope_type", "default")
        inner.expect("type", "default")
        # Which of a token's three positions turns a channel: for text they are one.
        inner.pass_over("mrope_section", "mrope_interleaved")
        base = inner.take("rope_theta", kind=float, default=base)
        share = inner.take("partial_rotary_factor", kind=float, default=share)
        inner.finish()
    return Rope(base, share)


def take_layer_kinds(s: Settings, *keys: str, names: dict[str, str], default: Any = None) -> tuple[str, ...]:
    """The kind of each layer, from a list of one name a layer.

    Args:
      s: the config.
      *keys: the key of the list, and its other spellings.
      names: what each supported name in the list means.
      default: the list where the key is absent; None: it must be there.

    Raises:
      ValueError: a layer has another name, or there are not `num_hidden_layers` of them.
    """
    listed = s.take(*keys, kind=list) if default is None else s.take(*keys, kind=list, default=default)
    if unknown := sorted({str(kind) for kind in listed} - names.keys()):
        raise ValueError(f"{s.where}: {keys[0]!r} holds {unknown}; supported are {sorted(names)}.")
    count = s.take("num_hidden_layers", kind=int, default=len(listed))
    if count != len(listed):
        raise ValueError(f"{s.where}: {keys[0]!r} names {len(listed)} layers, num_hidden_layers is {count}.")
    return tuple(names[kind] for kind in listed)
