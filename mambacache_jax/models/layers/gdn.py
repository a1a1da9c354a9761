"""Gated DeltaNet: the delta rule with one decay a head."""

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


class GatedDeltaNet(nnx.Module):
    """The mixer of Qwen3-Next and Qwen3.5.

    One map makes `[q k v | z | b | a]`; the conv runs over q, k and v. Queries and keys are normalised to
    length 1 (queries then scaled by `key_dim ** -0.5`), `beta = sigmoid(b)`, and the state decays by
    `exp(-exp(a_log) softplus(a + dt_bias))`. The output is normalised for each head and gated by silu(z).

    Attributes:
      spec: what the context keeps for a position.
    """

    def __init__(
        self,
        size: int,
        *,
        num_key_heads: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int = 4,
        beta_scale: float = 1.0,
        eps: float = 1e-6,
        out_scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer.

        Args:
          size: channels of the model.
          num_key_heads: heads of q and k.
          num_heads: heads of v and of the state, a multiple of `num_key_heads`.
          key_dim: channels of a query or key head.
          value_dim: channels of a value head.
          conv_width: taps of the conv.
          beta_scale: factor on beta; 2 allows negative eigenvalues (OLMo hybrid).
          eps: of the norm at the end.
          out_scale: multiplies the first weights of the map back into the residual.
          dtype: of parameters and activations; decays are float32.
          rngs: seeds.
        """
        if num_heads % num_key_heads:
            raise ValueError(
                f"GatedDeltaNet: {num_heads} value heads do not divide into {num_key_heads} key heads."
            )
        keys, values = num_key_heads * key_dim, num_heads * value_dim
        self.spec = RecurrentSpec(
            kind="gdn",
            num_heads=num_heads,
            state_dim=key_dim,
            head_dim=value_dim,
            conv_channels=2 * keys + values,
            conv_width=conv_width,
        )
        self.num_key_heads, self.beta_scale = num_key_heads, beta_scale
        self.in_proj = Linear(size, 2 * keys + 2 * values + 2 * num_heads, dtype=dtype, rngs=rngs)
        self.conv = ShortConv(2 * keys + values, conv_width, bias=False, dtype=dtype, rngs=rngs)
        self.a_log = nnx.Param(initial_a_log(num_heads, rngs))
        self.dt_bias = nnx.Param(initial_dt_bias(num_heads, rngs))
        self.norm = GatedRMSNorm(value_dim, eps=eps, dtype=dtype)
        self.out_proj = Linear(values, size, scale=out_scale, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "token size"], ctx: Context, layer: int) -> Float[Array, "token size"]:
        """Mixes each token with the state of its sequence."""
        tokens, heads, key_dim = x.shape[0], self.spec.num_heads, self.spec.state_dim
        keys, values = self.num_key_heads * key_dim, heads * self.spec.head_dim
        channels = self.spec.conv_channels
        raw, z, b, a = jnp.split(
            self.in_proj(x), [channels, channels + values, channels + values + heads], axis=-1
        )
        q, k, v = jnp.split(self.conv(raw, ctx, layer), [keys, 2 * keys], axis=-1)
        q, k = (l2_normalised(m.reshape(tokens, self.num_key_heads, key_dim)) for m in (q, k))
        v = v.reshape(tokens, heads, -1).astype(jnp.float32)
        beta = self.beta_scale * jax.nn.sigmoid(b).astype(jnp.float32)
        step = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...][None])
        log_decay = -jnp.exp(self.a_log[...])[None] * step
        y = ctx.recur(layer, q * key_dim**-0.5, k, v, log_decay, beta)
        return self.out_proj(self.norm(y, z.reshape(tokens, heads, -1)).reshape(tokens, -1))
