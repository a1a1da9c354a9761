"""Ragged rows of tokens, cut into blocks of one static size."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32


class Blocks(NamedTuple):
    """Which row each block of `Q` tokens belongs to, and where its valid tokens end.

    A row owns consecutive blocks, all full but its last. Padding blocks may stand between rows or behind.

    Attributes:
      row: row of each block, in `[0, R)`; `R` for a padding block.
      first: the block is its row's first in this call; True for a padding block.
      length: valid tokens, `1..Q`; 0 for a padding block. What lies behind them is never looked at.
      export: export `e` of the row is taken after this many tokens of this block (`1..length`);
        0 where it is not in this block.
    """

    row: Int32[Array, " block"]
    first: Bool[Array, " block"]
    length: Int32[Array, " block"]
    export: Int32[Array, "block export"]

    def valid(self, num_tokens: int) -> Bool[Array, "block token"]:
        """Which of a block's `num_tokens` tokens are not padding."""
        token = jax.lax.broadcasted_iota(jnp.int32, (self.length.shape[0], num_tokens), 1)
        return token < self.length[:, None]


def cut_rows(
    lengths: Sequence[int],
    block_tokens: int,
    *,
    exports: Sequence[Sequence[int]] | None = None,
    num_blocks: int | None = None,
) -> Blocks:
    """The blocks of rows laid out one after another, computed on the host.

    Args:
      lengths: tokens of each row; a row of 0 has no block.
      block_tokens: tokens of a block.
      exports: for each row, the positions (tokens of the row, `1..length`; 0 for none) of its exports, as
        many for each row.
      num_blocks: pads to this many blocks.

    Raises:
      ValueError: an export outside its row, rows with different numbers of exports, or too few blocks.
    """
    exports = [()] * len(lengths) if exports is None else exports
    num_exports = len(exports[0])
    if any(len(of_row) != num_exports for of_row in exports) or len(exports) != len(lengths):
        raise ValueError(f"cut_rows: every row needs as many exports; got {exports} for {len(lengths)} rows.")
    blocks = []
    for row, (length, of_row) in enumerate(zip(lengths, exports, strict=True)):
        if any(not 0 <= position <= length for position in of_row):
            raise ValueError(f"cut_rows: the exports {of_row} of row {row} must lie in its {length} tokens.")
        for start in range(0, length, block_tokens):
            count = min(block_tokens, length - start)
            here = [p - start if start < p <= start + count else 0 for p in of_row]
            blocks.append((row, start == 0, count, here))
    num_blocks = len(blocks) if num_blocks is None else num_blocks
    if num_blocks < len(blocks):
        raise ValueError(f"cut_rows: {len(blocks)} blocks are needed, num_blocks is {num_blocks}.")
    blocks += [(len(lengths), True, 0, [0] * num_exports)] * (num_blocks - len(blocks))
    row, first, length, export = zip(*blocks, strict=True)
    return Blocks(
        row=jnp.asarray(row, jnp.int32),
        first=jnp.asarray(first, bool),
        length=jnp.asarray(length, jnp.int32),
        export=jnp.asarray(np.reshape(export, (num_blocks, num_exports)), jnp.int32),
    )
