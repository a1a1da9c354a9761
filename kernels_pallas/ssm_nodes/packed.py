"""Pools that hold `g` heads side by side, `[slot, head // g, state_dim, g * head_dim]`.

TPUs tile the last axis by 128: heads of 64 would take twice their memory and traffic, and XLA would re-lay
the whole pool for a kernel.
"""

import jax.numpy as jnp


def count_heads(pool, pending, nodes):
    """The heads of a call: those of its inputs, or without any the pool's."""
    return next((x.v.shape[2] for x in (pending, nodes) if x is not None), pool.shape[1])


def unpack(states, num_heads):
    """`[row, head // g, state_dim, g * head_dim]` as `[row, head, state_dim, head_dim]`."""
    rows, packs, state_dim, lanes = states.shape
    if packs == num_heads:
        return states
    states = states.reshape(rows, packs, state_dim, num_heads // packs, -1)
    return jnp.moveaxis(states, 3, 2).reshape(rows, num_heads, state_dim, lanes * packs // num_heads)


def pack(states, pool):
    """`[..., head, state_dim, head_dim]` as the pool holds it."""
    *lead, num_heads, state_dim, head_dim = states.shape
    packs = pool.shape[1]
    if packs != num_heads:
        states = states.reshape(*lead, packs, num_heads // packs, state_dim, head_dim)
        states = jnp.moveaxis(states, -3, -2).reshape(*lead, *pool.shape[1:])
    return states.astype(pool.dtype)
