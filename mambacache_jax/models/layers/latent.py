"""Latent attention (MLA): all heads share one narrow key, which also holds the values."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mambacache_jax.config import AttentionSpec
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers.linear import Linear
from mambacache_jax.models.layers.norm import RMSNorm

_EXACT = jax.lax.Precision.HIGHEST


class LatentAttention(nnx.Module):
    """The attention of Kimi-Linear, without positions, in the form that attends to the latent itself.

    `[latent | shared] = down(x)`, and the latent is normalised. Head `h` has the key
    `[key_up[h] latent | shared]` and the value `value_up[h] latent`. Both maps are moved across the sum over
    tokens: the query is mapped to the latent, what comes back is mapped to a value. What a token keeps is
    `[latent | shared]` alone, once for all heads.

    Attributes:
      spec: what the context keeps for a token: one key head, whose first channels are the values.
      scale: factor on the products q.k.
      key_up: `[head, channel, latent]`.
      value_up: `[head, channel, latent]`.
    """

    def __init__(
        self,
        size: int,
        *,
        num_heads: int,
        latent_dim: int,
        key_dim: int,
        shared_dim: int,
        value_dim: int,
        eps: float = 1e-6,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer.

        Args:
          size: channels of the model.
          num_heads: query heads.
          latent_dim: channels of the latent.
          key_dim: channels of a head's key that come from the latent.
          shared_dim: channels of a key that all heads share.
          value_dim: channels of a head's value.
          eps: of the latent's norm.
          dtype: of parameters and activations.
          rngs: seeds.
        """
        self.spec = AttentionSpec(
            num_kv_heads=1, head_dim=latent_dim + shared_dim, v_head_dim=latent_dim, values_in_keys=True
        )
        self.scale = (key_dim + shared_dim) ** -0.5
        self.num_heads, self.key_dim = num_heads, key_dim

        def up(channels: int) -> nnx.Param:
            drawn = jax.random.normal(rngs.params(), (num_heads, channels, latent_dim), jnp.float32)
            return nnx.Param((drawn * latent_dim**-0.5).astype(dtype))

        self.query = Linear(size, num_heads * (key_dim + shared_dim), dtype=dtype, rngs=rngs)
        self.down = Linear(size, latent_dim + shared_dim, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(latent_dim, eps=eps, dtype=dtype)
        self.key_up, self.value_up = up(key_dim), up(value_dim)
        self.out = Linear(num_heads * value_dim, size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "token size"], ctx: Context, layer: int) -> Float[Array, "token size"]:
        """Attends to each token's own sequence up to itself."""
        tokens, latent_dim = x.shape[0], self.spec.v_head_dim
        query = self.query(x).reshape(tokens, self.num_heads, -1)
        own, shared = query[..., : self.key_dim], query[..., self.key_dim :]
        own = jnp.einsum("thc,hcl->thl", own, self.key_up[...], precision=_EXACT)
        latent, shared_key = jnp.split(self.down(x), [latent_dim], axis=-1)
        key = jnp.concatenate([self.norm(latent), shared_key], axis=-1)[:, None]
        out = ctx.attend(layer, jnp.concatenate([own, shared], axis=-1), key, None, self.scale)
        out = jnp.einsum("thl,hcl->thc", out, self.value_up[...], precision=_EXACT)
        return self.out(out.reshape(tokens, -1))
