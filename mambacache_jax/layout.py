"""Where each field of a packed step plan lies: the host packs it, the device unpacks it.

A step gets one int32 vector. Its layout is a function of static sizes alone, so a program compiled for
a shape serves every plan of that shape. Standard library only: both sides import this and nothing of
each other.

Rows and slots that are not used hold 0, the null row and the null slot. A token of -1 means "the token
that this row sampled last", which is on the device.
"""

import dataclasses
import functools
import math
from typing import Any

MAX_EXPORTS = 2
"""States that one row can export inside one step."""

SAMPLING_FIELDS = 5
"""temperature, top_p and min_p as float32 bits, then top_k and seed: `[..., 5]` int32 in that order."""

TABLE_BLOCK = 64
"""Entries of the request table that one update writes: an aligned run of one row."""

CONTEXT_TILE = 256
"""Positions of a request's KV that attention gathers at once, less where pages do not divide it."""

FROM_DEVICE = -1


def tile_pages(page_size: int) -> int:
    """Pages of one context tile."""
    return max(1, CONTEXT_TILE // page_size)


def context_pages(max_context: int, page_size: int) -> int:
    """Entries of a request-table row: whole tiles and whole update runs that cover `max_context` tokens."""
    unit = math.lcm(tile_pages(page_size), TABLE_BLOCK)
    return -(-max_context // (unit * page_size)) * unit


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """Static sizes of a step; equal shapes share a compiled program.

    Attributes:
      decode_rows: rows that advance by one token.
      blocks: blocks of `block_tokens` prompt tokens; 0 for a step that only decodes.
      block_tokens: tokens of a block.
      extend_rows: rows that the blocks belong to.
      updates: runs of `TABLE_BLOCK` request-table entries that can be written.
    """

    decode_rows: int
    blocks: int
    block_tokens: int
    extend_rows: int
    updates: int

    @functools.cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape of each field.

        decode rows: `decode_row` (request-table row), `decode_token`, `decode_position`, `decode_page`
        (a new page for this position, or 0), `decode_read`, `decode_write` (SSM slots), `decode_sampling`.
        extend rows: `row` (request-table row), `read`, `write`, `end` (position after the step),
        `export_slot`, `export_position`, `last` (index of the row's last token among the extend tokens),
        `samples` (1 if the row's last token is sampled), `sampling`.
        blocks: `block_row` (index of an extend row; `extend_rows` for padding), `block_first`,
        `block_length`, `block_start` (position), `block_export` (tokens of this block folded at the
        export, or 0), `token`.
        updates: `update_row`, `update_block` (which aligned run of the row), `update_pages`.
        """
        decode, blocks, rows = self.decode_rows, self.blocks, self.extend_rows
        shapes = {
            "decode_row": (decode,),
            "decode_token": (decode,),
            "decode_position": (decode,),
            "decode_page": (decode,),
            "decode_read": (decode,),
            "decode_write": (decode,),
            "decode_sampling": (decode, SAMPLING_FIELDS),
            "row": (rows,),
            "read": (rows,),
            "write": (rows,),
            "end": (rows,),
            "export_slot": (rows, MAX_EXPORTS),
            "export_position": (rows, MAX_EXPORTS),
            "last": (rows,),
            "samples": (rows,),
            "sampling": (rows, SAMPLING_FIELDS),
            "block_row": (blocks,),
            "block_first": (blocks,),
            "block_length": (blocks,),
            "block_start": (blocks,),
            "block_export": (blocks, MAX_EXPORTS),
            "token": (blocks, self.block_tokens),
            "update_row": (self.updates,),
            "update_block": (self.updates,),
            "update_pages": (self.updates, TABLE_BLOCK),
        }
        return _placed(shapes)

    @property
    def size(self) -> int:
        """int32 numbers in a plan of this shape."""
        return _size(self.fields)

    def unpack(self, plan: Any) -> dict[str, Any]:
        """Views (NumPy) or slices (JAX) of `plan`, an int32 vector of length `size`, by field name."""
        return _unpacked(self.fields, plan)


@dataclasses.dataclass(frozen=True)
class RoundShape:
    """Static sizes of a round of speculation; equal shapes share a compiled program.

    Attributes:
      rows: rows that verify drafts, or decode without.
      nodes: nodes of a draft tree, the bonus token included.
      updates: runs of `TABLE_BLOCK` request-table entries that can be written.
    """

    rows: int
    nodes: int
    updates: int

    @functools.cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape of each field.

        rows: `row` (request-table row), `read`, `write`, `track` (SSM slots), `fresh` (1: what the row has
        pending is another request's), `limit` (most tokens it may get), `drafts` (1: it may have drafts),
        `sampling`.
        trees: `token`, `parent` (node 0 is the token that the row sampled last, on the device), `node_len`.
        updates: as in `PlanShape`.
        """
        rows, tree = (self.rows,), (self.rows, self.nodes)
        shapes = dict.fromkeys(
            ("row", "read", "write", "track", "fresh", "limit", "drafts", "node_len"), rows
        )
        shapes |= {"token": tree, "parent": tree, "sampling": (self.rows, SAMPLING_FIELDS)}
        shapes |= {"update_row": (self.updates,), "update_block": (self.updates,)}
        return _placed({**shapes, "update_pages": (self.updates, TABLE_BLOCK)})

    @property
    def size(self) -> int:
        """int32 numbers in a plan of this shape."""
        return _size(self.fields)

    def unpack(self, plan: Any) -> dict[str, Any]:
        """See `PlanShape.unpack`."""
        return _unpacked(self.fields, plan)


_Fields = dict[str, tuple[int, tuple[int, ...]]]


def _placed(shapes: dict[str, tuple[int, ...]]) -> _Fields:
    """Offset and shape of fields that lie one after another."""
    fields, offset = {}, 0
    for name, shape in shapes.items():
        fields[name] = (offset, shape)
        offset += math.prod(shape)
    return fields


def _size(fields: _Fields) -> int:
    return max(offset + math.prod(shape) for offset, shape in fields.values())


def _unpacked(fields: _Fields, plan: Any) -> dict[str, Any]:
    return {
        name: plan[offset : offset + math.prod(shape)].reshape(shape)
        for name, (offset, shape) in fields.items()
    }
