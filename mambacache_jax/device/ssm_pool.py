"""The pool of SSM states, and the moves of whole states between its slots.

A slot holds the conv window and the recurrent state of one sequence position, in every recurrent layer.
Slot 0 is the null slot: padded rows write garbage there, and reading it means the zero state.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.slot_copy import slot_copy
from mambacache_jax.config import RecurrentSpec


class SSMPool(NamedTuple):
    """SSM states on the device, one array a layer and kind, indexed by slot.

    Attributes:
      conv: the last `width - 1` inputs of the causal conv, oldest first, in the model's dtype.
      state: the recurrent state, float32 unless `CacheConfig.state_dtype` says otherwise.
      position: the stamp: tokens folded into the slot, written by the program that wrote the state.
    """

    conv: tuple[Float[Array, "slot window channel"], ...]
    state: tuple[Float[Array, "slot head state_dim head_dim"], ...]
    position: Int32[Array, " slot"]


def make_ssm_pool(
    layers: Sequence[RecurrentSpec], num_slots: int, conv_dtype: str, state_dtype: str
) -> SSMPool:
    """A zeroed pool of `num_slots` slots, the null slot included."""
    return SSMPool(
        conv=tuple(jnp.zeros((num_slots, s.conv_width - 1, s.conv_channels), conv_dtype) for s in layers),
        state=tuple(
            jnp.zeros((num_slots, s.num_heads, s.state_dim, s.head_dim), state_dtype) for s in layers
        ),
        position=jnp.zeros((num_slots,), jnp.int32),
    )


def read_slots(leaf: Float[Array, "slot *shape"], slots: Int32[Array, " row"]) -> Float[Array, "row *shape"]:
    """The states of `slots`; the null slot reads as zero whatever it holds."""
    with jax.named_scope("ssm_read"):
        rows = leaf.at[slots].get(mode="promise_in_bounds")
        live = (slots != 0).reshape(slots.shape + (1,) * (leaf.ndim - 1))
        return jnp.where(live, rows, jnp.zeros((), leaf.dtype))


def write_slots(
    leaf: Float[Array, "slot *shape"], slots: Int32[Array, " row"], rows: Float[Array, "row *shape"]
) -> Float[Array, "slot *shape"]:
    """Writes `rows[i]` to `slots[i]` in the pool's dtype; slots distinct apart from the null slot."""
    with jax.named_scope("ssm_write"):
        return leaf.at[slots].set(rows.astype(leaf.dtype), mode="promise_in_bounds")


@functools.partial(jax.jit, donate_argnames="pool")
def copy_slots(pool: SSMPool, src: Int32[Array, " move"], dst: Int32[Array, " move"]) -> SSMPool:
    """Copies slot `src[i]` onto slot `dst[i]`, in every layer; copying the null slot clears.

    Args:
      pool: donated; the caller keeps only the pool returned.
      src: slots to read, in `[0, num_slots)`; apart from the null slot none of them is in `dst`.
      dst: slots to write, in `[0, num_slots)`, distinct apart from the null slot.

    Returns:
      The pool after the moves, in the same buffers.
    """
    return slot_copy(pool, src, dst)
