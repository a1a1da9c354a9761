"""Runs of tokens, halved again and again."""

import jax.numpy as jnp
import numpy as np


def half_lengths(num_tokens):
    """The lengths of the halves, from one token up, that runs of `num_tokens` tokens split into."""
    return [1 << bit for bit in range((num_tokens - 1).bit_length())]


def level_of(num_tokens):
    """`[i, j]`: the half length at which tokens `i > j` part, 0 on the diagonal, -1 above it.

    It is the highest bit in which `i` and `j` differ: `j` is in the first half of a run of twice that length
    and `i` in the second.
    """
    i, j = np.indices((num_tokens, num_tokens))
    level = np.where(i >= j, 0, -1)
    for h in half_lengths(num_tokens):
        level[(i > j) & ((i ^ j) // h == 1)] = h
    return level


def pad_tokens(x, axes):
    """Pads the last axis but one (`axes=1`) or the last two (`axes=2`) with zeros to a power of two."""
    num_tokens = x.shape[-2]
    pad = (1 << (num_tokens - 1).bit_length()) - num_tokens
    if not pad:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, pad), (0, pad if axes == 2 else 0)])


def split(x, h):
    """`[..., token, channel]` to the first and the second halves, `[..., run, h, channel]`."""
    x = x.reshape(*x.shape[:-2], -1, 2, h, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def join(first, below, second):
    """The lower triangular `[[first, 0], [below, second]]` in the last two axes."""
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)
