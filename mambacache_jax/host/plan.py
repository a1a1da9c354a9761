"""Builds the packed plan of one step, and refuses plans whose slots would race.

XLA's functional ops read every slot before they write one, so a plan that breaks the slot contract would
work there and corrupt states in an in-place kernel. The contract is therefore checked here, on the host.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mambacache_jax.config import EngineConfig
from mambacache_jax.host.chunking import num_blocks
from mambacache_jax.layout import FROM_DEVICE, MAX_EXPORTS, SAMPLING_FIELDS, TABLE_BLOCK, PlanShape

GREEDY = np.zeros(SAMPLING_FIELDS, np.int32)
"""Sampling fields of a row that takes the best token."""


def pack_sampling(temperature: float, top_p: float, min_p: float, top_k: int, seed: int) -> np.ndarray:
    """One row's sampling fields, int32 `[layout.SAMPLING_FIELDS]`."""
    floats = np.array([temperature, top_p, min_p], np.float32).view(np.int32)
    return np.concatenate([floats, np.array([top_k], np.int32), np.array([seed], np.uint32).view(np.int32)])


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """A row that advances by the token it sampled last.

    Attributes:
      row: request-table row, not 0.
      position: position of the token.
      page: the KV page that this position opens, or 0 if it lies on the row's last page.
      read: SSM slot of the state before the token; not 0.
      write: SSM slot of the state after it; may be `read`.
      sampling: see `pack_sampling`.
    """

    row: int
    position: int
    page: int
    read: int
    write: int
    sampling: np.ndarray
    token: int = FROM_DEVICE


@dataclasses.dataclass(frozen=True)
class ExtendRow:
    """A row that computes a run of tokens.

    Attributes:
      row: request-table row, not 0.
      start: position of the first token.
      tokens: int32, at least one.
      read: SSM slot of the state before them; 0 for a fresh request.
      write: SSM slot of the state after them.
      exports: (position, slot), positions ascending in `(start, start + len(tokens)]`.
      samples: whether the last token's logits are sampled.
      sampling: see `pack_sampling`.
    """

    row: int
    start: int
    tokens: np.ndarray
    read: int
    write: int
    exports: tuple[tuple[int, int], ...]
    samples: bool
    sampling: np.ndarray


@dataclasses.dataclass(frozen=True)
class TableUpdate:
    """An aligned run of a request-table row to write: `layout.TABLE_BLOCK` pages from run `block` on."""

    row: int
    block: int
    pages: np.ndarray


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes that steps are padded to, so that few programs are ever compiled.

    Attributes:
      decode_rows: ascending.
      blocks: ascending; the first is 0 if there are steps without blocks.
      block_tokens: tokens a block.
      extend_rows: rows of a step that has blocks.
      updates: table updates of a step that has blocks.
    """

    decode_rows: tuple[int, ...]
    blocks: tuple[int, ...]
    block_tokens: int
    extend_rows: int
    updates: int

    def shape(self, decode_rows: int, blocks: int, updates: int) -> PlanShape:
        """The smallest shape that holds so much; table updates need a step with blocks."""
        blocks = max(blocks, 1) if updates else blocks
        return self._shape(_fit(self.decode_rows, decode_rows), _fit(self.blocks, blocks))

    def shapes(self) -> list[PlanShape]:
        """Every shape that `shape` can return, small first."""
        return [
            self._shape(rows, blocks) for rows in self.decode_rows for blocks in self.blocks if rows + blocks
        ]

    def _shape(self, decode_rows: int, blocks: int) -> PlanShape:
        if not blocks:
            return PlanShape(decode_rows, 0, self.block_tokens, 0, 0)
        return PlanShape(decode_rows, blocks, self.block_tokens, self.extend_rows, self.updates)


def make_buckets(config: EngineConfig, page_size: int, *, rounds: bool = False) -> Buckets:
    """The buckets of an engine: in deterministic mode one shape, with every row an extend row.

    With `rounds` answers grow by rounds of speculation, and steps have no decode rows.
    """
    blocks = config.token_budget // config.block_tokens
    # A step can always tell the device of one request's whole table row and of all that its tokens open.
    run = TABLE_BLOCK * page_size
    updates = (
        num_blocks(config.max_context, run) + num_blocks(config.token_budget, run) + config.max_running + 1
    )
    if config.deterministic:
        return Buckets((0,), (blocks + config.max_running,), config.block_tokens, config.max_running, updates)
    return Buckets(
        decode_rows=(0,) if rounds else row_sizes(config),
        blocks=(0, *_sizes(2, blocks)),
        block_tokens=config.block_tokens,
        extend_rows=config.max_extend_rows,
        updates=updates,
    )


def row_sizes(config: EngineConfig) -> tuple[int, ...]:
    """The sizes that rows which advance by one step each are padded to, ascending."""
    return _sizes(4, config.max_running)


def _sizes(first: int, limit: int) -> tuple[int, ...]:
    """Bucket sizes `first`, four times that, ... and `limit`: few programs, at most four times padded."""
    sizes = []
    while first < limit:
        sizes.append(first)
        first *= 4
    return (*sizes, limit)


def _fit(sizes: Sequence[int], need: int) -> int:
    for size in sizes:
        if size >= need:
            return size
    raise ValueError(f"{need} does not fit the largest bucket, {sizes[-1]}.")


def check_slots(decode: Sequence[DecodeRow], extend: Sequence[ExtendRow]) -> None:
    """Raises ValueError unless the rows' slots keep the slot contract.

    Write and export slots are distinct and not the null slot, and none is another row's read slot. A row
    may write the slot it reads, and may not export to it.
    """
    owner: dict[int, int] = {}

    def claim(slot: int, row: int, what: str) -> None:
        if slot == 0:
            raise ValueError(f"Row {row} has the null slot as {what} slot.")
        if slot in owner:
            raise ValueError(
                f"SSM slot {slot} is written by row {owner[slot]} and again, as {what}, by row {row}."
            )
        owner[slot] = row

    for entry in (*decode, *extend):
        if entry.row == 0:
            raise ValueError("A live row cannot use request-table row 0, the null row.")
        claim(entry.write, entry.row, "write")
    for entry in extend:
        for _, slot in entry.exports:
            claim(slot, entry.row, "export")
            if slot == entry.read:
                raise ValueError(f"Row {entry.row} exports to slot {slot}, which it reads.")
    rows = [entry.row for entry in (*decode, *extend)]
    if len(set(rows)) != len(rows):
        raise ValueError(f"A request-table row appears twice in one plan: {sorted(rows)}.")
    for entry in (*decode, *extend):
        writer = owner.get(entry.read, entry.row)
        if entry.read and writer != entry.row:
            raise ValueError(f"Row {entry.row} reads SSM slot {entry.read}, which row {writer} writes.")
    for entry in decode:
        if entry.read == 0:
            raise ValueError(f"Decode row {entry.row} reads the null slot: it has no state.")


def build_plan(
    decode: Sequence[DecodeRow], extend: Sequence[ExtendRow], updates: Sequence[TableUpdate], shape: PlanShape
) -> np.ndarray:
    """Packs a step.

    Args:
      decode: at most `shape.decode_rows`.
      extend: at most `shape.extend_rows`, at most `shape.blocks` blocks together.
      updates: at most `shape.updates`; written before anything is read.
      shape: from `Buckets.shape`.

    Returns:
      A fresh int32 vector of `shape.size`, which the device may keep.

    Raises:
      ValueError: the rows break the slot contract or do not fit the shape.
    """
    check_slots(decode, extend)
    plan = np.zeros(shape.size, np.int32)
    fields = shape.unpack(plan)
    fields["block_row"][:] = shape.extend_rows
    fields["block_first"][:] = 1
    if decode:
        count = len(decode)
        fields["decode_row"][:count] = [entry.row for entry in decode]
        fields["decode_token"][:count] = [entry.token for entry in decode]
        fields["decode_position"][:count] = [entry.position for entry in decode]
        fields["decode_page"][:count] = [entry.page for entry in decode]
        fields["decode_read"][:count] = [entry.read for entry in decode]
        fields["decode_write"][:count] = [entry.write for entry in decode]
        fields["decode_sampling"][:count] = [entry.sampling for entry in decode]
    block = 0
    for i, entry in enumerate(extend):
        block = _pack_extend(fields, i, block, entry, shape.block_tokens)
    for i, update in enumerate(updates):
        fields["update_row"][i] = update.row
        fields["update_block"][i] = update.block
        fields["update_pages"][i, : len(update.pages)] = update.pages
    return plan


def _pack_extend(
    fields: dict[str, np.ndarray], i: int, block: int, entry: ExtendRow, block_tokens: int
) -> int:
    """Packs one extend row from block `block` on; returns the next free block."""
    count = len(entry.tokens)
    if not count or len(entry.exports) > MAX_EXPORTS:
        raise ValueError(f"Row {entry.row}: {count} tokens and {len(entry.exports)} exports in one step.")
    fields["row"][i] = entry.row
    fields["read"][i] = entry.read
    fields["write"][i] = entry.write
    fields["end"][i] = entry.start + count
    fields["samples"][i] = entry.samples
    fields["sampling"][i] = entry.sampling
    fields["last"][i] = block * block_tokens + count - 1
    for e, (position, slot) in enumerate(entry.exports):
        done = position - entry.start
        if not 0 < done <= count:
            raise ValueError(f"Row {entry.row} exports at {position}, outside its chunk.")
        fields["export_slot"][i, e] = slot
        fields["export_position"][i, e] = position
        in_block = (done - 1) // block_tokens
        fields["block_export"][block + in_block, e] = done - in_block * block_tokens
    for offset in range(0, count, block_tokens):
        run = entry.tokens[offset : offset + block_tokens]
        fields["block_row"][block] = i
        fields["block_first"][block] = offset == 0
        fields["block_length"][block] = len(run)
        fields["block_start"][block] = entry.start + offset
        fields["token"][block, : len(run)] = run
        block += 1
    return block
