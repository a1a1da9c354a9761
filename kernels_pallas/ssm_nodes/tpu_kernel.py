"""The body of `tpu`'s kernel: transfers of states, and both phases on the tile of one grid step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.recurrence import advance, read_out, rounded_product
from kernels_pallas.ssm_nodes.plan import NodesPlan
from kernels_pallas.ssm_nodes.tiles import node_outputs, products

LANES = 128

_READ, _WRITE, _TRACK, _COPY = range(4)


@dataclasses.dataclass(frozen=True)
class Tile:
    """What is known of a call when it is compiled.

    Attributes:
      kind, precision, depth, min_log_decay, num_rows, num_pending, num_nodes: of the call.
      packed: heads side by side in a state tile; everywhere else such a tile counts as one head.
      num_heads: of the pool.
      heads: heads of a grid step.
      groups: heads of a key head.
      interpret: products are then kept apart from sums, as XLA could join them.
    """

    kind: str
    precision: str
    packed: int
    num_rows: int
    num_heads: int
    heads: int
    groups: int
    num_pending: int
    num_nodes: int
    depth: int
    min_log_decay: float | None
    interpret: bool

    @property
    def parts(self) -> int:
        """Grid steps of a row."""
        return self.num_heads // self.heads

    @property
    def chain_heads(self) -> int:
        """Heads whose chains are folded side by side: those that share keys, as far as registers last."""
        return self._heads(2 if self.groups > 1 else 1)

    @property
    def unrolled_heads(self) -> int:
        """Heads whose one token is written out, for the compiler to overlap."""
        return self._heads(8)

    @property
    def node_heads(self) -> int:
        """Heads whose nodes' matmuls stand side by side, as far as registers last."""
        return self._heads(4 if self.num_nodes <= 16 else 2)

    def _heads(self, most):
        sizes = (n for n in (8, 4, 2, 1) if n <= most and self.heads % n == 0)
        return next(n for n in sizes if n % self.groups == 0 or self.groups % n == 0)


def kernel(tile, *refs):
    """One grid step; `refs` are the plan, the pool and inputs, the pool and outputs, and the buffers."""
    *plan, pool_in, inputs, pool, outs, buffers = refs
    plan = NodesPlan(*plan)
    # Asked for here, as interpreters know it only outside loops and branches.
    row, part = at = pl.program_id(0), pl.program_id(1)
    step = row * tile.parts + part
    last = tile.num_rows * tile.parts - 1
    half = step % 2
    # Without pending tokens states are sent from where they were fetched to, which the next fetch overwrites.
    folded, lag = ("write", 2) if tile.num_pending else ("read", 1)
    # A chain of one token is tracked where it ends.
    tracked = "track" if tile.num_pending > 1 else folded

    def fetch(step):
        slot = plan.read_slot[step // tile.parts]
        source, target = _heads(tile, pool_in, slot, step), buffers["read"].at[step % 2]
        return slot, pltpu.make_async_copy(source, target, buffers["moved"].at[_READ, step % 2])

    def start_fetch(step, _):
        slot, copy = fetch(step)
        pl.when(slot != 0)(copy.start)

        @pl.when(slot == 0)
        def _():
            target = buffers["read"].at[step % 2]

            def clear(head):
                target[head] = jnp.zeros(target.shape[1:], target.dtype)

            _by_heads(tile, 1, clear)

    def sends(step):
        """`(whether, copy)` of the folded and the tracked states."""
        for slots, name, which in ((plan.write_slot, folded, _WRITE), (plan.track_slot, tracked, _TRACK)):
            slot = slots[step // tile.parts]
            source, target = buffers[name].at[step % 2], _heads(tile, pool, slot, step)
            yield slot != 0, pltpu.make_async_copy(source, target, buffers["moved"].at[which, step % 2])

    def wait_sent(step):
        for moves, copy in sends(step):
            pl.when(moves)(copy.wait)

    pl.when(step >= lag)(lambda: wait_sent(step - lag))
    # The first step fetches its own states too.
    jax.lax.fori_loop(jnp.where(step == 0, 0, step + 1), jnp.minimum(step, last - 1) + 2, start_fetch, None)
    slot, copy = fetch(step)
    pl.when(slot != 0)(copy.wait)

    if tile.num_pending:
        _fold(tile, at, plan, inputs["pending"], outs.get("pending"), buffers, half)
    for moves, copy in sends(step):
        pl.when(moves)(copy.start)
    if tile.num_nodes:

        @pl.when(plan.node_len[row] != 0)
        def _():
            states = buffers[folded].at[half]
            if tile.precision == "exact":
                _node_by_node(tile, at, plan, inputs["nodes"], outs["nodes"], states, buffers["tree"])
            else:
                _in_matmuls(tile, part, inputs["nodes"], outs["nodes"], states)

    @pl.when(step == last)
    def _():
        if lag == 2 and last:
            wait_sent(step - 1)
        wait_sent(step)


def _heads(tile, pool, slot, step):
    return pool.at[slot, pl.ds((step % tile.parts) * tile.heads, tile.heads)]


def _by_heads(tile, heads, body):
    """Calls `body` with the first head of every `heads` of the step."""

    def step(n, _):
        body(n * heads)

    jax.lax.fori_loop(0, tile.heads // heads, step, None)


def _fold(tile, at, plan, inputs, out, buffers, half):
    """Phase 1."""
    row, _ = at
    length, track_len = plan.pending_len[row], plan.track_len[row]
    read, write, track = (buffers[name].at[half] for name in ("read", "write", "track"))
    token = functools.partial(_token, tile, at, plan, inputs, tile.num_pending)

    def after(t, first, states):
        states, outputs = token(t, first, states, out is not None)
        for n, o in enumerate(outputs):
            out[0, t, pl.ds(first + n, 1), :] = o
        return [_rounded(tile, s, read.dtype) for s in states]

    def load(first, heads):
        return [read[first + n].astype(jnp.float32) for n in range(heads)]

    def store(target, first, states):
        for n, s in enumerate(states):
            target[first + n] = s.astype(target.dtype)

    def chains(first):
        def step(t, states):
            states = after(t, first, states)
            pl.when(track_len == t + 1)(lambda: store(track, first, states))
            return states

        states = load(first, tile.chain_heads)
        store(write, first, jax.lax.fori_loop(0, length, step, states))

    def one_token(first):
        # One head after the other, which the compiler overlaps as far as registers last.
        for n in range(tile.unrolled_heads):
            store(write, first + n, after(0, first + n, load(first + n, 1)))

    if tile.num_pending > 1:
        _by_heads(tile, tile.chain_heads, chains)
        return
    pl.when(length != 0)(lambda: _by_heads(tile, tile.unrolled_heads, one_token))

    @pl.when(length == 0)
    def _():
        copy = pltpu.make_async_copy(read, write, buffers["moved"].at[_COPY, half])
        copy.start()
        copy.wait()


def _node_by_node(tile, at, plan, inputs, out, folded, tree):
    """Phase 2, "exact": `tree[0]` is the folded state, `tree[n + 1]` that of node `n`, of heads in flight."""
    row, _ = at
    token = functools.partial(_token, tile, at, plan, inputs, tile.num_nodes)

    def of_heads(first):
        heads = range(tile.chain_heads)
        for n in heads:
            tree[0, n] = folded[first + n].astype(jnp.float32)

        def step(t, _):
            states = [tree[plan.parent[row * tile.num_nodes + t] + 1, n] for n in heads]
            states, outputs = token(t, first, states, True)
            for n in heads:
                out[0, t, pl.ds(first + n, 1), :] = outputs[n]
                tree[t + 1, n] = _rounded(tile, states[n], folded.dtype)

        jax.lax.fori_loop(0, plan.node_len[row], step, None)

    _by_heads(tile, tile.chain_heads, of_heads)


def _in_matmuls(tile, part, inputs, out, folded):
    """Phase 2, "float32" and "fast"."""
    dot, _ = products(tile.precision)
    size = tile.node_heads
    # Given to each head: of a factor that heads share, products come out with heads inside, to be turned.
    ancestors = jnp.broadcast_to(inputs["ancestors"][0], (size, *inputs["ancestors"].shape[1:]))
    one_key = size <= tile.groups
    outputs = functools.partial(
        node_outputs,
        tile.kind,
        depth=tile.depth,
        min_log_decay=tile.min_log_decay,
        dot=dot,
        sum_dot=_sum_dot,
        dot_both=functools.partial(_dot_both, dot),
    )
    # The products of heads stand side by side in the program, as the matrix unit keeps their order.
    of_key, own = None if one_key else 0, None if tile.kind == "mamba2" else 0
    outputs = jax.vmap(outputs, in_axes=(0, of_key, of_key, 0, 0, own, 0))

    def of_heads(first):
        def columns(name, which):
            head = part * tile.heads + first
            heads = [(head + n) * tile.packed + which for n in range(size)]
            return jnp.stack([_lane(inputs[name][0], head) for head in heads])

        def keys(name):
            first_key = first // tile.groups if tile.groups <= tile.heads else 0
            if one_key:
                return inputs[name][0, first_key]
            x = inputs[name][0, pl.ds(first_key, size // tile.groups)]
            return jnp.repeat(x, tile.groups, axis=0) if tile.groups > 1 else x

        heads = pl.ds(first, size)
        # Each head of a tile is computed in all lanes, of which its own are kept: the matrix unit is as wide.
        of_each = [
            outputs(
                folded[heads].astype(jnp.float32),
                keys("q"),
                keys("k"),
                inputs["v"][0, heads],
                inputs["log_decay"][0, heads] if tile.kind == "kda" else columns("log_decay", which),
                None if tile.kind == "mamba2" else columns("beta", which),
                ancestors,
            )
            for which in range(tile.packed)
        ]
        out[0, heads] = _side_by_side(tile, of_each, of_each[0].shape)

    _by_heads(tile, size, of_heads)


def _sum_dot(mask, x):
    """`mask @ x` in float32: three bfloat16 parts hold `x`, one a mask, where any two factors take six."""
    dot, _ = products("fast")
    high = _first_bits(x)
    middle = _first_bits(x - high)
    return dot(mask, high) + (dot(mask, middle) + dot(mask, x - high - middle))


def _first_bits(x):
    """What a bfloat16 can hold of `x`, cut off."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**16))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _dot_both(dot, x, y, z, transposed=False):
    """Both as rows of one factor, so that the matrix unit takes in the other once."""
    rows = x.shape[0]
    both = dot(jnp.concatenate([x, y]), z, transposed)
    return both[:rows], both[rows:]


def _lane(x, lane):
    """One lane of `x`, known at run time, as a column."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(lanes == lane, x, 0.0), axis=1, keepdims=True)


def _token(tile, at, plan, inputs, steps, t, first, states, reads):
    """One token of heads in flight: states `[state_dim, head_dim]`, not rounded, and outputs or Nones."""
    row, part = at
    product = rounded_product(plan.pending_len[row]) if tile.interpret else jnp.multiply
    offset = part * tile.heads
    lanes = states[0].shape[1]

    def columns(name, heads, n):
        """The token's column for head `n` in flight, from the heads or key heads of the row."""
        column = (offset + first + n) // (tile.num_heads // heads) * steps + t
        return _spread(inputs[name][0, column // LANES], column % LANES, lanes)

    def number(name, n):
        head = (offset + first + n) * tile.packed
        return _side_by_side(tile, [inputs[name][0, t, head + n] for n in range(tile.packed)], (1, lanes))

    key_heads = tile.num_heads // tile.groups
    after, keys, queries = [], {}, {}
    for n, state in enumerate(states):
        key = n // tile.groups
        if key not in keys:
            keys[key] = columns("k", key_heads, n)
        kda = tile.kind == "kda"
        log_decay = columns("log_decay", tile.num_heads, n) if kda else number("log_decay", n)
        beta = None if tile.kind == "mamba2" else number("beta", n)
        v = inputs["v"][0, t, pl.ds(first + n, 1), :]
        after.append(advance(tile.kind, state, keys[key], v, log_decay, beta, product=product))
    if not reads:
        return after, []
    # Spread only now, so that keys and queries do not fill the registers together.
    outputs = []
    for n, state in enumerate(after):
        key = n // tile.groups
        if key not in queries:
            queries[key] = columns("q", key_heads, n)
        outputs.append(read_out(state, queries[key], product=product))
    return after, outputs


def _side_by_side(tile, values, shape):
    """Values of the heads of a state tile, each in its head's lanes."""
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    width = shape[-1] // tile.packed
    joined = jnp.broadcast_to(values[-1], shape)
    for n in reversed(range(tile.packed - 1)):
        joined = jnp.where(lane < (n + 1) * width, values[n], joined)
    return joined


def _spread(x, lane, lanes):
    """One lane of `x` `[rows, 128]` in all of `lanes` lanes."""
    column = jnp.take_along_axis(x, jnp.full(x.shape, lane, jnp.int32), axis=1)
    copies = -(-lanes // LANES)
    return jnp.concatenate([column] * copies, axis=1)[:, :lanes]


def _rounded(tile, state, dtype):
    """As `reference.round_state`, which Mosaic does not lower; it keeps pairs of casts."""
    if dtype == jnp.float32:
        return state
    return (
        jax.lax.reduce_precision(state, 8, 7) if tile.interpret else state.astype(dtype).astype(jnp.float32)
    )
