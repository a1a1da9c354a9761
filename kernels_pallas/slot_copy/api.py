"""Whole slots of pools, copied and cleared in place, in every array at once.

A pool is an array `[slot, ...]` of any dtype; pools come as any tree of them with the same number of slots,
such as the states, conv windows and stamps of all layers. Slot 0 is the null slot: reading it means zero
whatever it holds, and what is written to it is garbage that nobody reads, so it pads moves.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kernels_pallas.dispatch import Op
from kernels_pallas.slot_copy import reference, xla

Pools = TypeVar("Pools")

OP = Op(
    "slot_copy",
    {"xla": xla.slot_copy, "reference": reference.slot_copy},
    order={"cpu": ("xla",), "gpu": ("xla",), "tpu": ("xla",)},
)


def slot_copy(
    pools: Pools,
    src: Int32[Array, " move"],
    dst: Int32[Array, " move"],
    *,
    implementation: str | None = None,
) -> Pools:
    """Copies slot `src[i]` onto slot `dst[i]` in every array of `pools`.

    Args:
      pools: donate them to the program that calls this; those returned are then in the same buffers.
      src: slots to read, in `[0, num_slots)`; apart from the null slot none of them is in `dst`.
      dst: slots to write, in `[0, num_slots)`, distinct apart from the null slot.
      implementation: "xla" (all moves at once) or "reference" (one after another); by default the platform's
        order. A named one never falls back.

    Returns:
      The pools after the moves; slots that are not in `dst` keep every bit.

    Raises:
      ValueError: an unknown implementation, or arrays with different numbers of slots.
    """
    _check("slot_copy", pools)
    return OP(implementation, pools, src, dst)


def slot_clear(pools: Pools, slots: Int32[Array, " clear"]) -> Pools:
    """Sets `slots` to zero in every array of `pools`; repeats are harmless, and so is the null slot.

    Raises:
      ValueError: arrays with different numbers of slots.
    """
    _check("slot_clear", pools)
    return jax.tree.map(lambda leaf: leaf.at[slots].set(jnp.zeros((), leaf.dtype)), pools)


def _check(op, pools):
    sizes = sorted({leaf.shape[0] for leaf in jax.tree.leaves(pools)})
    if len(sizes) > 1:
        raise ValueError(f"{op}: the pools must have one number of slots, got {sizes}.")
