"""Multi-token prediction over a frozen cache: one block that drafts the token after the next."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from mambacache_jax.models.layers.attention import Attend, FrozenAttention
from mambacache_jax.models.layers.linear import Linear
from mambacache_jax.models.layers.mlp import SwiGLU
from mambacache_jax.models.layers.norm import RMSNorm


class MTPBlock(nnx.Module):
    """`h' = block(W [rms(embedding of the next token) ; rms(h)])`, with the model's embedding and head.

    Its attention reads K and V of one attention layer of the target and writes none.
    """

    def __init__(
        self,
        size: int,
        *,
        attention: FrozenAttention,
        mlp_size: int,
        eps: float = 1e-6,
        out_scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the block around `attention`, whose head sizes follow the layer that it reads."""
        self.embedding_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.fuse = Linear(2 * size, size, dtype=dtype, rngs=rngs)
        self.attention_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = SwiGLU(size, mlp_size, out_scale=out_scale, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(size, eps=eps, dtype=dtype)

    def __call__(
        self,
        embedded: Float[Array, "token size"],
        hidden: Float[Array, "token size"],
        positions: Int32[Array, " token"],
        attend: Attend,
    ) -> Float[Array, "token size"]:
        """The hidden vector that the model's head turns into the draft's logits."""
        pair = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x = self.fuse(pair)
        x = x + self.attention(self.attention_norm(x), positions, attend)
        x = x + self.mlp(self.mlp_norm(x))
        return self.norm(x)
