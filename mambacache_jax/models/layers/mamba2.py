"""Mamba-2: one decay a head, grouped B and C, and no delta rule."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mambacache_jax.config import RecurrentSpec
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers.conv import ShortConv
from mambacache_jax.models.layers.decay import initial_a_log, initial_dt_bias
from mambacache_jax.models.layers.linear import Linear
from mambacache_jax.models.layers.norm import GatedRMSNorm


class Mamba2(nnx.Module):
    """The mixer of Granite 4, Nemotron-H, Bamba and Falcon-H1.

    One map makes `[z | v B C | dt]`; the conv runs over v, B and C. With `delta = softplus(dt + dt_bias)`
    the state decays by `exp(-exp(a_log) delta)`, takes in `B (x) delta v`, and is read by C; `skip * v` is
    added, and the result is gated by z and normalised.

    Attributes:
      spec: what the context keeps for a position.
    """

    def __init__(
        self,
        size: int,
        *,
        num_heads: int,
        head_dim: int,
        state_dim: int,
        num_groups: int = 1,
        conv_width: int = 4,
        conv_bias: bool = True,
        in_bias: bool = False,
        out_bias: bool = False,
        norm: bool = True,
        gate_first: bool = True,
        multipliers: tuple[float, float, float, float, float] | None = None,
        eps: float = 1e-5,
        out_scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer.

        Args:
          size: channels of the model.
          num_heads: heads of the state, a multiple of `num_groups`.
          head_dim: channels of a head.
          state_dim: channels of B and C.
          num_groups: B and C are shared by the heads of a group; the norm is over a group, too.
          conv_width: taps of the conv.
          conv_bias: the conv has a bias.
          in_bias: the first map has a bias.
          out_bias: the last map has a bias.
          norm: normalise at the end; False only gates (some Falcon-H1).
          gate_first: gate before the norm.
          multipliers: factors on what the first map makes: z, v, B, C and dt (Falcon-H1).
          eps: of the norm.
          out_scale: multiplies the first weights of the map back into the residual.
          dtype: of parameters and activations; decays are float32.
          rngs: seeds.
        """
        if num_heads % num_groups:
            raise ValueError(f"Mamba2: {num_heads} heads do not divide into {num_groups} groups.")
        inner, grouped = num_heads * head_dim, num_groups * state_dim
        self.spec = RecurrentSpec(
            kind="mamba2",
            num_heads=num_heads,
            state_dim=state_dim,
            head_dim=head_dim,
            conv_channels=inner + 2 * grouped,
            conv_width=conv_width,
        )
        self.num_groups = num_groups
        self.multipliers = multipliers
        self.in_proj = Linear(size, 2 * inner + 2 * grouped + num_heads, bias=in_bias, dtype=dtype, rngs=rngs)
        self.conv = ShortConv(inner + 2 * grouped, conv_width, bias=conv_bias, dtype=dtype, rngs=rngs)
        self.a_log = nnx.Param(initial_a_log(num_heads, rngs))
        self.dt_bias = nnx.Param(initial_dt_bias(num_heads, rngs))
        self.skip = nnx.Param(jnp.ones((num_heads,), jnp.float32))
        self.norm = (
            GatedRMSNorm(inner, num_groups=num_groups, gate_first=gate_first, eps=eps, dtype=dtype)
            if norm
            else None
        )
        self.out_proj = Linear(inner, size, bias=out_bias, scale=out_scale, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "token size"], ctx: Context, layer: int) -> Float[Array, "token size"]:
        """Mixes each token with the state of its sequence."""
        tokens, heads, groups = x.shape[0], self.spec.num_heads, self.num_groups
        inner = heads * self.spec.head_dim
        mapped = self.in_proj(x)
        if self.multipliers is not None:
            grouped = groups * self.spec.state_dim
            factors = np.repeat(self.multipliers, [inner, inner, grouped, grouped, heads])
            mapped = mapped * jnp.asarray(factors, mapped.dtype)[None]
        z, raw, dt = jnp.split(mapped, [inner, inner + self.spec.conv_channels], axis=-1)
        v, b, c = jnp.split(
            self.conv(raw, ctx, layer), [inner, inner + groups * self.spec.state_dim], axis=-1
        )
        v = v.reshape(tokens, heads, -1).astype(jnp.float32)
        b, c = (m.reshape(tokens, groups, -1).astype(jnp.float32) for m in (b, c))
        delta = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...][None])
        log_decay = -jnp.exp(self.a_log[...])[None] * delta
        y = ctx.recur(layer, c, b, v * delta[..., None], log_decay, None)
        y = (y + v * self.skip[...][None, :, None]).reshape(tokens, -1)
        if self.norm is None:
            gated = (y * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
        else:
            gated = self.norm(y, z)
        return self.out_proj(gated)
