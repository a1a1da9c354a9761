"""Recurrences of ragged rows, cut into blocks, beside the same recurrences token by token in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.blocks import Blocks, cut_rows
from kernels_pallas.ssm_scan import ssm_scan

_scan = jax.jit(ssm_scan, static_argnames=("kind", "implementation"))


@dataclasses.dataclass
class Problem:
    """Rows of one recurrence. `inputs` are q, k, v, log_decay, beta, each a list of one array a row."""

    kind: str
    block_tokens: int
    inputs: list[list[np.ndarray] | None]
    initial: np.ndarray

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.inputs[0]]

    def packed(self, blocks: Blocks) -> list:
        """The inputs in blocks, NaN at padding tokens."""
        return [None if rows is None else _pack(rows, blocks, self.block_tokens) for rows in self.inputs]

    def scan(self, implementation="xla", exports=None, num_blocks=None, blocks=None):
        """`(outputs, one array a row; final; exports)` of `ssm_scan`."""
        if blocks is None:
            blocks = cut_rows(self.lengths, self.block_tokens, exports=exports, num_blocks=num_blocks)
        out, final, exported = _scan(
            self.kind, *self.packed(blocks), jnp.asarray(self.initial), blocks, implementation=implementation
        )
        out, row, length = (np.asarray(x) for x in (out, blocks.row, blocks.length))
        assert not out[~np.asarray(blocks.valid(self.block_tokens))].any(), "padding tokens must put out 0"
        outs = [
            np.concatenate([out[b, : length[b]] for b in np.flatnonzero(row == r)] or [out[0, :0]])
            for r in range(len(self.initial))
        ]
        return outs, np.asarray(final), np.asarray(exported)

    def expected(self):
        """`(outputs, states after 0, 1, ... tokens)`, one array a row, in float64."""
        outs, states = [], []
        for r, state in enumerate(self.initial):
            q, k, v, log_decay, beta = (None if x is None else x[r].astype(np.float64) for x in self.inputs)
            out, after = _recurrence(self.kind, q, k, v, log_decay, beta, state.astype(np.float64))
            outs.append(out)
            states.append(after)
        return outs, states

    def part(self, start, stop, initial):
        """The same rows, tokens `start[r]` to `stop[r]`, from other states."""
        inputs = [
            None if rows is None else [x[a:b] for x, a, b in zip(rows, start, stop, strict=True)]
            for rows in self.inputs
        ]
        return Problem(self.kind, self.block_tokens, inputs, np.asarray(initial))


def _recurrence(kind, q, k, v, log_decay, beta, state):
    groups = v.shape[1] // k.shape[1]
    outs, states = [], [state]
    for t in range(len(v)):
        key, query = (np.repeat(x[t], groups, axis=0) for x in (k, q))
        decay = np.exp(log_decay[t])
        state = state * (decay[:, :, None] if kind == "kda" else decay[:, None, None])
        u = v[t] if kind == "mamba2" else beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, key))
        state = state + key[:, :, None] * u[:, None, :]
        outs.append(np.einsum("hkv,hk->hv", state, query))
        states.append(state)
    return np.reshape(outs, v.shape), np.stack(states)


def _pack(rows, blocks, block_tokens):
    packed = np.full((len(blocks.row), block_tokens, *rows[0].shape[1:]), np.nan, np.float32)
    used = [0] * len(rows)
    for b, (row, length) in enumerate(zip(blocks.row.tolist(), blocks.length.tolist(), strict=True)):
        if length:
            packed[b, :length] = rows[row][used[row] : used[row] + length]
            used[row] += length
    return jnp.asarray(packed)


def _problem(
    kind,
    lengths,
    *,
    block_tokens=16,
    heads=(2, 4),
    state_dim=8,
    head_dim=8,
    decay=(1e-4, 20.0),
    seed=0,
) -> Problem:
    """A random problem: unit keys and queries, decay rates spread evenly in their logarithm over `decay`."""
    rng = np.random.default_rng(seed)
    key_heads, num_heads = heads

    def rows(*shape, draw=rng.standard_normal):
        return [draw(size=(n, *shape)).astype(np.float32) for n in lengths]

    def unit(rows):
        return [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rows]

    q, k = unit(rows(key_heads, state_dim)), unit(rows(key_heads, state_dim))
    rate = rows(
        *((num_heads, state_dim) if kind == "kda" else (num_heads,)),
        draw=lambda size: np.exp(rng.uniform(*np.log(decay), size=size)),
    )
    beta = None if kind == "mamba2" else rows(num_heads, draw=lambda size: rng.uniform(0, 1, size))
    initial = rng.standard_normal((len(lengths), num_heads, state_dim, head_dim)).astype(np.float32)
    return Problem(kind, block_tokens, [q, k, rows(num_heads, head_dim), [-x for x in rate], beta], initial)


@pytest.fixture(scope="session")
def problem():
    """Makes a random `Problem`."""
    return _problem
