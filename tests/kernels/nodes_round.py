"""Calls of `ssm_nodes` on random rows, beside the same recurrence token by token in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels_pallas.ssm_nodes import Inputs, NodesPlan, check_plan, ssm_nodes

KINDS = ("mamba2", "gdn", "kda")
TREES = ("chain", "star", "bushy", "eagle", "forest")

_call = jax.jit(ssm_nodes, static_argnames=("kind", "precision", "depth", "min_log_decay", "implementation"))


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: slots, how many pending tokens and nodes it has, and where the tracked state lies."""

    read: int = 0
    write: int = 0
    pending: int = 0
    track: tuple[int, int] = (0, 0)
    nodes: int = 0


@dataclasses.dataclass(frozen=True)
class Round:
    """Arguments of one call, as NumPy arrays. What must not be read holds NaN."""

    kind: str
    pool: np.ndarray
    pending: Inputs | None
    nodes: Inputs | None
    plan: NodesPlan

    def call(self, implementation=None, **options):
        """`(pool, pending_out, node_out)`; the plan is checked first, and slots it does not write after."""
        check_plan(self.plan, num_slots=len(self.pool), num_pending=self.num_pending)
        result = _call(*self.arguments(), implementation=implementation, **options)
        pool, pending_out, node_out = (None if x is None else np.asarray(x) for x in result)
        assert pool.dtype == self.pool.dtype
        written = {0, *self.plan.write_slot.tolist(), *self.plan.track_slot.tolist()}
        other = [slot for slot in range(len(pool)) if slot not in written]
        assert pool[other].tobytes() == self.pool[other].tobytes(), "a slot changed that nobody writes"
        for out, length in ((pending_out, self.plan.pending_len), (node_out, self.plan.node_len)):
            if out is not None:
                padding = np.arange(out.shape[1])[None, :] >= length[:, None]
                assert not out[padding].any(), "padding must put out 0"
        return pool, pending_out, node_out

    def arguments(self):
        return self.kind, *jax.tree.map(jnp.asarray, (self.pool, self.pending, self.nodes, self.plan))

    @property
    def num_pending(self):
        return 0 if self.pending is None else self.pending.v.shape[1]

    def expected(self):
        """`(pool, pending_out, node_out)` in float64; states are rounded as the pool rounds them."""
        pool = self.pool.astype(np.float64)
        num_rows, num_nodes = self.plan.parent.shape
        heads = self.pool.shape[1], self.pool.shape[3]
        pending_out, node_out = (
            np.zeros((num_rows, self.num_pending, *heads)),
            np.zeros((num_rows, num_nodes, *heads)),
        )
        for r, (read, write, track, track_len, pending_len, parent, node_len) in enumerate(
            zip(*self.plan, strict=True)
        ):
            start = self.pool[read].astype(np.float64) if read else np.zeros(self.pool.shape[1:])
            chain = [start]
            for step in range(pending_len):
                state, pending_out[r, step] = _token(self.kind, chain[-1], self.pending, r, step)
                chain.append(self._stored(state))
            if track:
                pool[track] = chain[track_len]
            if write:
                pool[write] = chain[-1]
            states = []
            for node in range(node_len):
                before = states[parent[node]] if parent[node] >= 0 else chain[-1]
                state, node_out[r, node] = _token(self.kind, before, self.nodes, r, node)
                states.append(self._stored(state))
        return pool, pending_out, node_out

    def _stored(self, state):
        return state if self.pool.dtype == np.float32 else state.astype(self.pool.dtype).astype(np.float64)

    def part(self, pool, start, stop, read, write, track=None):
        """The call that folds pending tokens `start[r]` to `stop[r]` alone, from other slots and states."""
        length = np.asarray(stop) - np.asarray(start)
        # Two widths only, so that few programs are compiled.
        steps = 1 if length.max() <= 1 else self.num_pending
        zero = np.zeros(len(length), np.int32)

        def cut(x):
            if x is None:
                return None
            out = np.full((len(x), steps, *x.shape[2:]), np.nan, np.float32)
            for r, (a, b) in enumerate(zip(start, stop, strict=True)):
                out[r, : b - a] = x[r, a:b]
            return out

        plan = NodesPlan(
            np.asarray(read, np.int32),
            np.asarray(write, np.int32),
            zero if track is None else np.asarray(track[0], np.int32),
            zero if track is None else np.asarray(track[1], np.int32),
            length.astype(np.int32),
            np.zeros((len(length), 0), np.int32),
            zero,
        )
        return Round(self.kind, pool, Inputs(*(cut(x) for x in self.pending)), None, plan)


def make_round(
    kind,
    rows,
    *,
    num_pending,
    num_nodes,
    tree="bushy",
    heads=(2, 4),
    state_dim=8,
    head_dim=8,
    decay=(1e-4, 20.0),
    dtype="float32",
    seed=0,
) -> Round:
    """A random call: unit keys and queries, decay rates spread evenly in their logarithm over `decay`."""
    rng = np.random.default_rng(seed)
    num_slots = 2 + max(slot for row in rows for slot in (row.read, row.write, row.track[0]))
    pool = np.full((num_slots, heads[1], state_dim, head_dim), np.nan, np.float32)
    for row in rows:
        if row.read:
            pool[row.read] = rng.standard_normal(pool.shape[1:])
    columns = zip(*((r.read, r.write, *r.track, r.pending) for r in rows), strict=True)
    read, write, track, track_len, pending_len = (np.array(x, np.int32) for x in columns)
    node_len = np.array([r.nodes for r in rows], np.int32)
    parent = np.stack([draw_tree(tree, n, num_nodes, rng) for n in node_len])
    plan = NodesPlan(read, write, track, track_len, pending_len, parent, node_len)
    shape = (kind, heads, state_dim, head_dim)
    return Round(
        kind,
        pool.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32),
        _inputs(pending_len, num_pending, shape, decay, rng) if num_pending else None,
        _inputs(node_len, num_nodes, shape, decay, rng) if num_nodes else None,
        plan,
    )


def draw_tree(tree, num_live, num_nodes, rng):
    """Parents of a tree of `num_live` nodes; nonsense at padding nodes."""
    parent = rng.integers(-(2**31), 2**31 - 1, num_nodes).astype(np.int32)
    for n in range(num_live):
        parent[n] = {
            "chain": n - 1,
            "star": 0 if n else -1,
            # Recent nodes are likelier, so that paths get long.
            "bushy": -1 if n == 0 else rng.integers(max(0, n - 6), n),
            # A root, then levels of four nodes that continue the best ones of the level above.
            "eagle": -1
            if n == 0
            else 0
            if n <= 4
            else 4 * ((n - 1) // 4 - 1) + 1 + min(rng.geometric(0.5) - 1, 3),
            "forest": rng.integers(-1, n),
        }[tree]
    return parent


def _inputs(lengths, steps, shape, decay, rng):
    kind, (key_heads, num_heads), state_dim, head_dim = shape
    lead = len(lengths), steps

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    decays = (num_heads, state_dim) if kind == "kda" else (num_heads,)
    arrays = (
        unit(rng.standard_normal((*lead, key_heads, state_dim))),
        unit(rng.standard_normal((*lead, key_heads, state_dim))),
        rng.standard_normal((*lead, num_heads, head_dim)),
        -np.exp(rng.uniform(*np.log(decay), size=(*lead, *decays))),
        None if kind == "mamba2" else rng.uniform(0, 1, (*lead, num_heads)),
    )
    padding = np.arange(steps)[None, :] >= lengths[:, None]
    arrays = [None if x is None else x.astype(np.float32) for x in arrays]
    for x in arrays:
        if x is not None:
            x[padding] = np.nan
    return Inputs(*arrays)


def _token(kind, state, inputs, row, step):
    q, k, v, log_decay, beta = (None if x is None else x[row, step].astype(np.float64) for x in inputs)
    q, k = (np.repeat(x, v.shape[0] // x.shape[0], axis=0) for x in (q, k))
    state = state * np.exp(log_decay[..., None] if kind == "kda" else log_decay[:, None, None])
    u = v if kind == "mamba2" else beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
    state = state + k[:, :, None] * u[:, None, :]
    return state, np.einsum("hkv,hk->hv", state, q)


def assert_close(got, want, tolerance):
    """The largest error is at most `tolerance` of the largest value wanted."""
    assert np.isfinite(got).all()
    scale = np.abs(want).max(initial=0.0)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)
