"""A device without arithmetic: it runs packed plans, and a slot holds what it is the state or the KV of.

A KV slot holds (token, position, hash of the prefix up to it), an SSM slot (position, hash of the tokens
folded). A step reads the same int32 plan as the real one. It is as hostile as a correct in-place kernel may
be: rows run interleaved in random order, every slot that the step will write is filled with garbage before
anything is read, and the null slots, null row and unused outputs hold garbage always. What a row reads is
checked, and the next token is a function of what was read, so a wrong state gives another text.
"""

import dataclasses
import random
from typing import NamedTuple

import numpy as np

from mambacache_jax import layout
from mambacache_jax.config import CacheConfig, EngineConfig, SamplingParams
from mambacache_jax.host.chunking import num_pages
from mambacache_jax.layout import FROM_DEVICE, PlanShape

_MASK = 2**64 - 1


class KV(NamedTuple):
    """What one KV slot holds."""

    token: int
    position: int
    prefix: int


class State(NamedTuple):
    """What one SSM slot holds: `position` is the device's stamp."""

    position: int
    prefix: int


ZERO = State(0, 0)
BAD_KV, BAD_STATE = KV(-9, -9, -9), State(-9, -9)


def fold(prefix: int, token: int) -> int:
    """Hash of a prefix and one token more."""
    return (prefix * 6364136223846793005 + token + 1442695040888963407) & _MASK


def states(tokens: list[int]) -> list[State]:
    """The state after each prefix of `tokens`, the empty one first."""
    result = [ZERO]
    for token in tokens:
        result.append(State(result[-1].position + 1, fold(result[-1].prefix, token)))
    return result


def next_token(state: State, seed: int, vocab: int) -> int:
    """The model: any change of prefix, position or seed gives another token, as far as `vocab` allows."""
    mixed = (state.prefix ^ (seed * 0x9E3779B97F4A7C15) ^ state.position) * 0xBF58476D1CE4E5B9 & _MASK
    return (mixed >> 33) % vocab


def plain(prompt: list[int], params: SamplingParams, vocab: int) -> tuple[list[int], str]:
    """What a loop without batches, pools or cache generates, and why it ends."""
    seed = params.seed if params.temperature else 0
    state, tokens = states(prompt)[-1], []
    while len(tokens) < params.max_tokens:
        tokens.append(next_token(state, seed, vocab))
        if tokens[-1] in params.stop_token_ids:
            return tokens, "stop"
        state = State(state.position + 1, fold(state.prefix, tokens[-1]))
    return tokens, "length"


@dataclasses.dataclass
class _Row:
    """One row of a step while it runs: `tokens` are still to come."""

    row: int
    read: int
    write: int
    tokens: list[tuple[int, int]]
    exports: dict[int, int]
    output: int | None
    seed: int
    state: State | None = None


class SymbolicDevice:
    """Pools and request table, and the step on them.

    Attributes:
      kv: by slot.
      ssm: by slot.
      drop_exports: a fault: exports are not written, though the plan asks for them; slots keep what they had.
      computed: tokens computed so far, per step the whole batch.
    """

    def __init__(self, cache: CacheConfig, config: EngineConfig, vocab: int, seed: int = 0) -> None:
        self._page = cache.page_size
        self.kv = [BAD_KV] * (cache.num_kv_slots + self._page)
        self.ssm = [BAD_STATE] * (cache.num_ssm_slots + 1)
        pages = num_pages(config.max_context, self._page)
        width = num_pages(pages, layout.TABLE_BLOCK) * layout.TABLE_BLOCK
        self._pages = [[0] * width for _ in range(config.max_running + 1)]
        self._last_token = [-9] * (config.max_running + 1)
        self._vocab, self._random = vocab, random.Random(seed)
        self.drop_exports = False
        self.computed: list[int] = []

    def run(self, plan: np.ndarray, shape: PlanShape) -> np.ndarray:
        """Runs one step; returns its tokens, garbage where nothing was sampled."""
        assert (plan.dtype, plan.shape) == (np.int32, (shape.size,))
        fields = shape.unpack(plan)
        self._update_table(fields)
        rows = self._decode_rows(fields) + self._extend_rows(fields, shape)
        assert len({row.row for row in rows}) == len(rows), "a request-table row runs twice in one step."
        self._poison(rows)
        self.computed.append(sum(len(row.tokens) for row in rows))
        tokens = [self._random.randrange(self._vocab) for _ in range(shape.decode_rows + shape.extend_rows)]
        while rows:
            row = self._random.choice(rows)
            self._run_token(row)
            if not row.tokens:
                rows.remove(row)
                if row.output is not None:
                    tokens[row.output] = self._last_token[row.row] = self._sample(row)
        return np.array(tokens, np.int32)

    def _update_table(self, fields: dict[str, np.ndarray]) -> None:
        rows, blocks = fields["update_row"].tolist(), fields["update_block"].tolist()
        live = [where for where in zip(rows, blocks, strict=True) if where[0]]
        assert len(set(live)) == len(live), "a run of the request table is written twice."
        for row, block, pages in zip(rows, blocks, fields["update_pages"].tolist(), strict=True):
            start = block * layout.TABLE_BLOCK
            assert start + len(pages) <= len(self._pages[row]), "a table update beyond its row."
            self._pages[row][start : start + len(pages)] = pages
        for row, position, page in zip(
            fields["decode_row"].tolist(),
            fields["decode_position"].tolist(),
            fields["decode_page"].tolist(),
            strict=True,
        ):
            if page:
                self._pages[row][position // self._page] = page

    def _decode_rows(self, fields: dict[str, np.ndarray]) -> list[_Row]:
        return [
            _Row(
                row=int(row),
                read=int(fields["decode_read"][i]),
                write=int(fields["decode_write"][i]),
                tokens=[(int(fields["decode_position"][i]), int(fields["decode_token"][i]))],
                exports={},
                output=i,
                seed=_seed(fields["decode_sampling"][i]),
            )
            for i, row in enumerate(fields["decode_row"])
            if row
        ]

    def _extend_rows(self, fields: dict[str, np.ndarray], shape: PlanShape) -> list[_Row]:
        rows = []
        for i, row in enumerate(fields["row"].tolist()):
            blocks = [b for b in range(shape.blocks) if fields["block_row"][b] == i]
            assert bool(row) == bool(blocks), "a row without blocks, or blocks without a row."
            if not row:
                continue
            assert blocks == list(range(blocks[0], blocks[0] + len(blocks))), "a row's blocks are apart."
            assert fields["block_first"][blocks].tolist() == [1] + [0] * (len(blocks) - 1)
            assert (fields["block_length"][blocks[:-1]] == shape.block_tokens).all(), "a gap inside a row."
            tokens: list[tuple[int, int]] = []
            exports = {}
            for b in blocks:
                start, length = int(fields["block_start"][b]), int(fields["block_length"][b])
                assert length > 0, "an empty block in a row."
                assert not tokens or start == tokens[-1][0] + 1, "a row's positions have a gap."
                tokens += zip(range(start, start + length), fields["token"][b, :length].tolist(), strict=True)
                for e, done in enumerate(fields["block_export"][b].tolist()):
                    if done:
                        stamp = fields["export_position"][i, e]
                        assert stamp == start + done, "an export with a wrong stamp."
                        exports[start + done] = int(fields["export_slot"][i, e])
            slots = [slot for slot in fields["export_slot"][i].tolist() if slot]
            assert sorted(exports.values()) == sorted(slots), (
                "a slot without its export, or two in one place."
            )
            assert fields["end"][i] == tokens[-1][0] + 1, "a row with a wrong stamp."
            assert fields["last"][i] == blocks[0] * shape.block_tokens + len(tokens) - 1
            rows.append(
                _Row(
                    row=row,
                    read=int(fields["read"][i]),
                    write=int(fields["write"][i]),
                    tokens=tokens,
                    exports=exports,
                    output=shape.decode_rows + i if fields["samples"][i] else None,
                    seed=_seed(fields["sampling"][i]),
                )
            )
        return rows

    def _poison(self, rows: list[_Row]) -> None:
        """Fills what this step will write, and all that padding may write, with garbage."""
        self.kv[: self._page] = [BAD_KV] * self._page
        self.ssm[0], self._last_token[0] = BAD_STATE, -9
        self._pages[0] = [self._random.randrange(len(self.kv) // self._page) for _ in self._pages[0]]
        kv = [self._slot(row.row, position) for row in rows for position, _ in row.tokens]
        assert all(slot >= self._page for slot in kv), "a token's KV goes to the null page."
        assert len(set(kv)) == len(kv), "two tokens' KV go to the same slot."
        for slot in kv:
            self.kv[slot] = BAD_KV
        for row in rows:
            for slot in (row.write, *row.exports.values()):
                assert slot, "a row writes the null slot."
                kept = slot == row.write == row.read or (self.drop_exports and slot != row.write)
                if not kept:
                    self.ssm[slot] = BAD_STATE

    def _slot(self, row: int, position: int) -> int:
        return self._pages[row][position // self._page] * self._page + position % self._page

    def _run_token(self, row: _Row) -> None:
        position, token = row.tokens.pop(0)
        if row.state is None:
            row.state = self.ssm[row.read] if row.read else ZERO
            self._check_context(row, position)
        if token == FROM_DEVICE:
            token = self._last_token[row.row]
        assert 0 <= token < self._vocab, f"row {row.row} is fed {token} at {position}."
        row.state = State(position + 1, fold(row.state.prefix, token))
        self.kv[self._slot(row.row, position)] = KV(token, position, row.state.prefix)
        self.ssm[row.write] = row.state
        if position + 1 in row.exports and not self.drop_exports:
            self.ssm[row.exports[position + 1]] = row.state
        if not row.tokens:
            self._check_context(row, position + 1)

    def _check_context(self, row: _Row, length: int) -> None:
        """The row's state is the one after `length` tokens, and its KV that of the same tokens."""
        assert row.state is not None
        assert row.state.position == length, (
            f"row {row.row} at {length} reads SSM slot {row.read}, which holds {row.state}."
        )
        prefix = 0
        for position in range(length):
            slot = self._slot(row.row, position)
            kv = self.kv[slot]
            prefix = fold(prefix, kv.token)
            right = kv == (kv.token, position, prefix)
            assert right, f"row {row.row} at {position} reads KV slot {slot}, which holds {kv}."
        assert prefix == row.state.prefix, f"row {row.row}: KV and state at {length} are of different tokens."

    def _sample(self, row: _Row) -> int:
        assert row.state is not None
        return next_token(row.state, row.seed, self._vocab)


def _seed(sampling: np.ndarray) -> int:
    """The seed of a row that samples, 0 for a greedy one."""
    return int(sampling[4:].view(np.uint32)[0]) if sampling[:1].view(np.float32)[0] > 0 else 0
