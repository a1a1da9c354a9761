"""Grouped-query attention, whose K and V the context keeps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from mambacache_jax.config import AttentionSpec
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers.linear import Linear
from mambacache_jax.models.layers.norm import RMSNorm
from mambacache_jax.models.layers.rotary import rotate

Attend = Callable[[Array, float], Array]
"""`(q [token, q_head, head_dim], scale) -> [token, q_head, v_head_dim]`, over K and V held elsewhere."""


class Attention(nnx.Module):
    """Causal attention of `num_heads` query heads over `num_kv_heads` KV heads.

    One map makes `[q | k | v]`, and with `output_gate` a gate of v's width for each query head after them.

    Attributes:
      spec: what the context keeps for a token.
      scale: factor on the products q.k.
    """

    def __init__(
        self,
        size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        scale: float | None = None,
        rope_base: float | None = 10_000.0,
        rotary_dim: int | None = None,
        qk_norm: bool = False,
        unit_offset: bool = False,
        output_gate: bool = False,
        bias: bool = False,
        key_multiplier: float = 1.0,
        eps: float = 1e-6,
        out_scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer.

        Args:
          size: channels of the model.
          num_heads: query heads, a multiple of `num_kv_heads`.
          num_kv_heads: heads of K and V.
          head_dim: channels of a query or key head.
          v_head_dim: channels of a value head; None: `head_dim`.
          scale: factor on q.k; None: `head_dim ** -0.5`.
          rope_base: base of the rotary angles; None: no positions at all.
          rotary_dim: channels of a head that are rotated; None: all.
          qk_norm: RMS norm of each query and key head before it is rotated.
          unit_offset: those norms multiply by `1 + weight`.
          output_gate: multiply the output by the sigmoid of a gate before the last map.
          bias: both maps have biases.
          key_multiplier: factor on the keys (Falcon-H1).
          eps: of those norms.
          out_scale: multiplies the first weights of the map back into the residual.
          dtype: of parameters and activations.
          rngs: seeds.
        """
        if num_heads % num_kv_heads:
            raise ValueError(f"Attention: {num_heads} query heads do not split over {num_kv_heads} KV heads.")
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.spec = AttentionSpec(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.num_heads, self.rope_base, self.rotary_dim = num_heads, rope_base, rotary_dim
        self.key_multiplier = key_multiplier
        widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_head_dim]
        if output_gate:
            widths.append(num_heads * v_head_dim)
        self.splits = tuple(sum(widths[: i + 1]) for i in range(len(widths) - 1))
        self.qkv = Linear(size, sum(widths), bias=bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(head_dim, eps=eps, unit_offset=unit_offset, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=eps, unit_offset=unit_offset, dtype=dtype) if qk_norm else None
        self.out = Linear(num_heads * v_head_dim, size, bias=bias, scale=out_scale, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "token size"], ctx: Context, layer: int) -> Float[Array, "token size"]:
        """Attends to each token's own sequence up to itself."""
        q, k, v, *gate = jnp.split(self.qkv(x), self.splits, axis=-1)
        q = self._prepared(q, self.num_heads, self.q_norm, ctx.positions)
        k = self._prepared(k * self.key_multiplier, self.spec.num_kv_heads, self.k_norm, ctx.positions)
        v = v.reshape(x.shape[0], self.spec.num_kv_heads, self.spec.v_head_dim)
        out = ctx.attend(layer, q, k, v, self.scale).reshape(x.shape[0], -1)
        return self.out(out * jax.nn.sigmoid(gate[0]) if gate else out)

    def _prepared(
        self, heads: Array, num_heads: int, norm: RMSNorm | None, positions: Int32[Array, " token"]
    ) -> Array:
        heads = heads.reshape(heads.shape[0], num_heads, -1)
        heads = heads if norm is None else norm(heads)
        if self.rope_base is None:
            return heads
        return rotate(heads, positions, base=self.rope_base, rotary_dim=self.rotary_dim)


class FrozenAttention(nnx.Module):
    """Attention that has queries only and reads another layer's K and V; it keeps nothing.

    Attributes:
      scale: factor on the products q.k.
    """

    def __init__(
        self,
        size: int,
        *,
        num_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        scale: float | None = None,
        rope_base: float | None = 10_000.0,
        rotary_dim: int | None = None,
        out_scale: float = 1.0,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer; head sizes and rotation are those of the layer whose K and V it reads."""
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.num_heads, self.rope_base, self.rotary_dim = num_heads, rope_base, rotary_dim
        self.q = Linear(size, num_heads * head_dim, dtype=dtype, rngs=rngs)
        self.out = Linear(num_heads * v_head_dim, size, scale=out_scale, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "token size"], positions: Int32[Array, " token"], attend: Attend
    ) -> Float[Array, "token size"]:
        """Attends, through `attend`, with each token's query rotated to its position."""
        q = self.q(x).reshape(x.shape[0], self.num_heads, -1)
        if self.rope_base is not None:
            q = rotate(q, positions, base=self.rope_base, rotary_dim=self.rotary_dim)
        return self.out(attend(q, self.scale).reshape(x.shape[0], -1))
