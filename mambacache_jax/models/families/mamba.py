"""The Mamba-2 keys that Granite 4, Bamba and Falcon-H1 share."""

from typing import NamedTuple

from flax import nnx

from mambacache_jax.models.checkpoint import rules as r
from mambacache_jax.models.checkpoint.rules import Rules
from mambacache_jax.models.checkpoint.settings import Settings
from mambacache_jax.models.families.family import Dtype
from mambacache_jax.models.layers import Mamba2


class MambaSizes(NamedTuple):
    """Sizes of a Mamba-2 layer; see `Mamba2`."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm: bool = True
    gate_first: bool = True
    multipliers: tuple[float, float, float, float, float] | None = None

    def module(self, size: int, eps: float, dtype: Dtype, rngs: nnx.Rngs) -> Mamba2:
        """A fresh layer."""
        return Mamba2(size, **self._asdict(), eps=eps, dtype=dtype, rngs=rngs)

    def rules(self, ours: str, theirs: str) -> Rules:
        """Where the layer's parameters are in a checkpoint."""
        return r.mamba2(
            ours,
            theirs,
            in_bias=self.in_bias,
            out_bias=self.out_bias,
            conv_bias=self.conv_bias,
            norm=self.norm,
        )


def take_mamba(s: Settings, size: int) -> MambaSizes:
    """The `mamba_*` keys.

    Raises:
      ValueError: a key is missing, or steps are limited (the recurrences do not clamp dt).
    """
    expand = s.take("mamba_expand", kind=int, default=2)
    num_heads = s.take("mamba_n_heads", kind=int)
    s.expect("mamba_hidden_act", "silu")
    s.expect("time_step_limit", [0.0, float("inf")])
    inner = s.take("mamba_d_ssm", kind=int, default=expand * size)
    given = s.take("mamba_d_head", kind=object, default="auto")
    head_dim = inner // num_heads if given == "auto" else s.take("mamba_d_head", kind=int)
    bias = s.take("mamba_proj_bias", kind=bool, default=False)
    return MambaSizes(
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=s.take("mamba_d_state", kind=int),
        num_groups=s.take("mamba_n_groups", kind=int, default=1),
        conv_width=s.take("mamba_d_conv", kind=int, default=4),
        conv_bias=s.take("mamba_conv_bias", kind=bool, default=True),
        in_bias=bias,
        out_bias=s.take("projectors_bias", kind=bool, default=bias),
    )
