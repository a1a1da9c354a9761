"""The inverse of many small unit lower triangular matrices, in matmuls.

Platform solvers call LAPACK or a batched library once a matrix, and on CPU its threads fight with XLA's (a
hundred times slower on a busy machine). Joining `[[P, 0], [-R A P, R]]` from halves is as accurate as
substitution where a power series of `A` is not: a key that is written again and again makes `A` all ones,
and its powers binomials.
"""

import jax.numpy as jnp

from kernels_pallas.ssm_scan.dot import dot
from kernels_pallas.ssm_scan.halves import half_lengths, join, level_of, pad_tokens

# Halves of fewer tokens than this are joined in one masked product of tiles of this size.
_TILE = 16


def unit_lower_inverse(x):
    """`(I + strictly_lower(x))^-1` over the last two axes of `[block, key_head, group, token, token]`."""
    num_tokens = x.shape[-1]
    x = pad_tokens(x, axes=2)
    size = x.shape[-1]
    tile = min(_TILE, size)

    diagonal = jnp.stack([x[..., s : s + tile, s : s + tile] for s in range(0, size, tile)], axis=3)
    level = jnp.asarray(level_of(tile)).reshape((1,) * 4 + (tile, tile))
    inverse = jnp.where(level == 0, 1.0, jnp.where(level == 1, -diagonal, 0.0))
    for h in half_lengths(tile)[1:]:
        below = dot("bngsil,bngslj->bngsij", jnp.where(level == h, diagonal, 0.0), inverse)
        inverse = inverse - dot("bngsil,bngslj->bngsij", inverse, below)

    for h in half_lengths(size)[len(half_lengths(tile)) :]:
        below = jnp.stack([x[..., s + h : s + 2 * h, s : s + h] for s in range(0, size, 2 * h)], axis=3)
        pairs = inverse.reshape(*below.shape[:4], 2, h, h)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        below = dot("bngsil,bngslj->bngsij", second, dot("bngsil,bngslj->bngsij", below, first))
        inverse = join(first, -below, second)
    return inverse[..., 0, :num_tokens, :num_tokens]
