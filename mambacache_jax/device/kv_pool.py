"""The pool of KV rows: K and V of one token in every attention layer."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mambacache_jax.config import AttentionSpec


class KVPool(NamedTuple):
    """K and V on the device, one array a layer each, indexed by slot. The first page is the null page.

    Attributes:
      k: `[slot, kv_head, head_dim]` a layer, in the model's dtype.
      v: `[slot, kv_head, v_head_dim]` a layer; without channels where K holds the values.
    """

    k: tuple[Float[Array, "slot head head_dim"], ...]
    v: tuple[Float[Array, "slot head v_head_dim"], ...]


def make_kv_pool(layers: Sequence[AttentionSpec], num_slots: int, dtype: str) -> KVPool:
    """A zeroed pool of `num_slots` slots, the null page included."""
    return KVPool(
        k=tuple(jnp.zeros((num_slots, s.num_kv_heads, s.head_dim), dtype) for s in layers),
        v=tuple(
            jnp.zeros((num_slots, s.num_kv_heads, 0 if s.values_in_keys else s.v_head_dim), dtype)
            for s in layers
        ),
    )


def write_rows(
    leaf: Float[Array, "slot head dim"], slots: Int32[Array, " token"], rows: Float[Array, "token head dim"]
) -> Float[Array, "slot head dim"]:
    """Writes `rows[i]` to `slots[i]`: in `[0, num_slots)`, distinct apart from the null page's."""
    with jax.named_scope("kv_write"):
        return leaf.at[slots].set(rows.astype(leaf.dtype), mode="promise_in_bounds")
