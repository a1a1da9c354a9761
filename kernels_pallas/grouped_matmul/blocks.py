"""`grouped_matmul` as a loop over blocks of rows, each of one group.

A group's last block reaches into the rows of the next group. Blocks run in order, so those rows are written
again with their own products; only the very last block must not, and it is moved back to end with the rows.
Nothing is padded or copied: beside the result there is one block and one matrix.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_SMALLEST, _LARGEST = 8, 64


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: at most half an average group, since half a block a group is wasted on average."""
    half = max(1, rows // groups // 2)
    return min(rows, max(_SMALLEST, min(_LARGEST, 1 << (half.bit_length() - 1))))


def grouped_matmul(
    x: Float[Array, "row in"], weight: Float[Array, "group in out"], sizes: Int32[Array, " group"]
) -> Float[Array, "row out"]:
    """See `api.grouped_matmul`."""
    rows, groups = x.shape[0], weight.shape[0]
    block = block_rows(rows, groups)
    starts = jnp.cumsum(sizes) - sizes
    blocks = (sizes + block - 1) // block
    ends = jnp.cumsum(blocks)
    offset = jnp.arange(block, dtype=jnp.int32)

    def body(index: Array, out: Array) -> Array:
        group = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        start = starts[group] + (index - ends[group] + blocks[group]) * block
        at = jnp.minimum(start, rows - block)
        taken = jax.lax.dynamic_slice_in_dim(x, at, block)
        matrix = jax.lax.dynamic_index_in_dim(weight, group, keepdims=False)
        product = jnp.matmul(taken, matrix, precision=jax.lax.Precision.HIGHEST)
        # Rows before `start`, where the block was moved back, belong to what has been written before.
        before = jax.lax.dynamic_slice_in_dim(out, at, block)
        product = jnp.where((at + offset >= start)[:, None], product, before)
        return jax.lax.dynamic_update_slice_in_dim(out, product, at, axis=0)

    return jax.lax.fori_loop(0, ends[-1], body, jnp.zeros((rows, weight.shape[2]), x.dtype))
