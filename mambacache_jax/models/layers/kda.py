"""Kimi Delta Attention: the delta rule with one decay a state channel."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mambacache_jax.config import RecurrentSpec
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers.conv import ShortConv
from mambacache_jax.models.layers.decay import initial_a_log, initial_dt_bias
from mambacache_jax.models.layers.linear import Linear
from mambacache_jax.models.layers.norm import GatedRMSNorm, l2_normalised


class KimiDeltaAttention(nnx.Module):
    """The recurrent mixer of Kimi-Linear.

    One map makes `[q k v | b | f | g]`; the conv runs over q, k and v (three convs in a checkpoint: it is
    depthwise, so one over all channels is the same). Decays `exp(-exp(a_log) softplus(decay(f) + dt_bias))`
    and the output's gate `sigmoid(gate(g))` come through narrow maps. Queries and keys are normalised to
    length 1, queries then scaled by `head_dim ** -0.5`.

    Attributes:
      spec: what the context keeps for a position.
    """

    def __init__(
        self,
        size: int,
        *,
        num_heads: int,
        head_dim: int,
        rank: int | None = None,
        conv_width: int = 4,
        eps: float = 1e-5,
        out_scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer.

        Args:
          size: channels of the model.
          num_heads: heads of q, k, v and of the state.
          head_dim: channels of each of them.
          rank: width of f and g; None: `head_dim`.
          conv_width: taps of the conv.
          eps: of the norm at the end.
          out_scale: multiplies the first weights of the map back into the residual.
          dtype: of parameters and activations; decays are float32.
          rngs: seeds.
        """
        inner, rank = num_heads * head_dim, head_dim if rank is None else rank
        self.spec = RecurrentSpec(
            kind="kda",
            num_heads=num_heads,
            state_dim=head_dim,
            head_dim=head_dim,
            conv_channels=3 * inner,
            conv_width=conv_width,
        )
        self.rank = rank
        self.in_proj = Linear(size, 3 * inner + num_heads + 2 * rank, dtype=dtype, rngs=rngs)
        self.conv = ShortConv(3 * inner, conv_width, bias=False, dtype=dtype, rngs=rngs)
        self.decay = Linear(rank, inner, dtype=dtype, rngs=rngs)
        self.gate = Linear(rank, inner, dtype=dtype, rngs=rngs)
        self.a_log = nnx.Param(initial_a_log(num_heads, rngs))
        self.dt_bias = nnx.Param(initial_dt_bias(inner, rngs))
        self.norm = GatedRMSNorm(head_dim, gate="sigmoid", eps=eps, dtype=dtype)
        self.out_proj = Linear(inner, size, scale=out_scale, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "token size"], ctx: Context, layer: int) -> Float[Array, "token size"]:
        """Mixes each token with the state of its sequence."""
        heads, head_dim, channels = self.spec.num_heads, self.spec.head_dim, self.spec.conv_channels
        raw, b, f, g = jnp.split(
            self.in_proj(x), [channels, channels + heads, channels + heads + self.rank], axis=-1
        )

        def by_head(m: Array) -> Array:
            return m.reshape(x.shape[0], heads, head_dim)

        q, k, v = (by_head(m) for m in jnp.split(self.conv(raw, ctx, layer), 3, axis=-1))
        q, k = (l2_normalised(m) for m in (q, k))
        beta = jax.nn.sigmoid(b).astype(jnp.float32)
        step = jax.nn.softplus(by_head(self.decay(f).astype(jnp.float32) + self.dt_bias[...][None]))
        log_decay = -jnp.exp(self.a_log[...])[None, :, None] * step
        y = ctx.recur(layer, q * head_dim**-0.5, k, v.astype(jnp.float32), log_decay, beta)
        return self.out_proj(self.norm(y, by_head(self.gate(g))).reshape(x.shape[0], -1))
