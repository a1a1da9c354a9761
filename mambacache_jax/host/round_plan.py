"""Builds the packed plan of one round of speculation."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mambacache_jax.host.draft_tree import check_tree
from mambacache_jax.host.plan import ExtendRow, TableUpdate, check_slots
from mambacache_jax.layout import RoundShape


@dataclasses.dataclass(frozen=True)
class RoundRow:
    """A row that verifies drafts behind the token it sampled last.

    Attributes:
      row: request-table row, not 0.
      read: SSM slot of the state before what is pending; not 0.
      write: SSM slot of the state after it; may be `read`.
      track: SSM slot for the state at a track point inside it, or 0.
      fresh: what the row has pending on the device is another request's.
      limit: most tokens that the row may get, at least 1.
      drafts: whether a draft model on the device may propose.
      tokens: int32 candidates that the host proposes.
      parent: of each of them; -1 behind the token sampled last.
      sampling: see `pack_sampling`.
    """

    row: int
    read: int
    write: int
    track: int
    fresh: bool
    limit: int
    drafts: bool
    tokens: np.ndarray
    parent: np.ndarray
    sampling: np.ndarray


def build_round_plan(
    rows: Sequence[RoundRow], updates: Sequence[TableUpdate], shape: RoundShape
) -> np.ndarray:
    """Packs a round.

    Args:
      rows: at most `shape.rows`.
      updates: at most `shape.updates`; written before anything is read.
      shape: its sizes.

    Returns:
      A fresh int32 vector of `shape.size`, which the device may keep.

    Raises:
      ValueError: the rows break the slot contract, a tree is none, or something does not fit the shape.
    """
    # A track slot is to a row what an export is to a chunk.
    check_slots((), [_as_extend(row) for row in rows])
    if len(rows) > shape.rows or len(updates) > shape.updates:
        raise ValueError(f"{len(rows)} rows and {len(updates)} updates do not fit {shape}.")
    plan = np.zeros(shape.size, np.int32)
    fields = shape.unpack(plan)
    fields["parent"][:] = -1
    for i, entry in enumerate(rows):
        count = 1 + len(entry.tokens)
        if count > shape.nodes:
            raise ValueError(f"Row {entry.row}: {count} nodes do not fit {shape.nodes}.")
        for name in ("row", "read", "write", "track", "fresh", "limit", "drafts", "sampling"):
            fields[name][i] = getattr(entry, name)
        fields["node_len"][i] = count
        fields["token"][i, 1:count] = entry.tokens
        fields["parent"][i, 1:count] = entry.parent + 1
        check_tree(fields["parent"][i, :count], rooted=True)
    for i, update in enumerate(updates):
        fields["update_row"][i] = update.row
        fields["update_block"][i] = update.block
        fields["update_pages"][i, : len(update.pages)] = update.pages
    return plan


def _as_extend(row: RoundRow) -> ExtendRow:
    if row.read == 0:
        raise ValueError(f"Row {row.row} reads the null slot: it has no state.")
    exports = ((0, row.track),) if row.track else ()
    return ExtendRow(row.row, 0, row.tokens, row.read, row.write, exports, False, row.sampling)
