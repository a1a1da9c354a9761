"""`ssm_nodes` for NVIDIA GPUs, in Pallas for Triton.

One program for each tile of `head_dim`, head and row. It loads its part of the row's state once, folds the
pending chain in float32 registers and stores the result to the write slot; a tracked state is stored on the
way. The nodes' outputs come from the registers. So the pool is read once, written once and never copied, and
not moved at all for a null slot. On a CPU Pallas interprets the same kernel.

The bits of a token depend neither on the tile nor on what else the program does: products are rounded on
their own and sums are an explicit tree, in whatever layout the compiler holds a tile.
"""

import dataclasses
import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.dispatch import current_platform
from kernels_pallas.recurrence import advance, read_out, rounded_product
from kernels_pallas.ssm_nodes import tiles
from kernels_pallas.ssm_nodes.packed import count_heads
from kernels_pallas.ssm_nodes.reference import round_state
from kernels_pallas.ssm_nodes.tree import ancestor_mask

# A matrix product's smallest side.
_MIN_SIDE = 16
# More node states do not fit registers, and more pairs of nodes take longer than XLA.
_MAX_EXACT_NODES = _MAX_PAIRWISE_NODES = 16


class Tile(NamedTuple):
    """What one program works on.

    Attributes:
      head_dim: columns of the state.
      num_warps: 32 threads each, which share the tile's registers.
    """

    head_dim: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class _Static:
    kind: str
    tile: int
    precision: str
    depth: int
    min_log_decay: float | None
    interpret: bool


def ssm_nodes(kind, pool, pending, nodes, plan, *, precision, depth, min_log_decay, tile=None):
    """See `api.ssm_nodes`; `tile` replaces `default_tile`'s, to measure it."""
    pending, nodes = (None if x is None or not x.v.shape[1] else x for x in (pending, nodes))
    num_rows, num_nodes = plan.parent.shape
    num_heads, head_dim = pool.shape[1], pool.shape[3]
    depth = min(depth, num_nodes)
    _check(kind, pool, pending, nodes, precision, depth, min_log_decay)
    tile = tile or default_tile(pool, nodes, precision)
    interpret = current_platform() == "cpu"
    _keep_jax_quiet()
    tree = None
    if nodes is not None:
        tree = plan.parent if precision == "exact" else ancestor_mask(plan.parent, plan.node_len, depth)
    args = (pool, plan._replace(parent=tree), pending, nodes)
    wants = (pool, *(None if x is None or x.q is None else x.v for x in (pending, nodes)))

    whole = pl.BlockSpec(memory_space=pl.ANY)
    in_specs = (
        whole,
        jax.tree.map(_row_spec, args[1]),
        *(_specs(tile.head_dim, num_heads, x) for x in (pending, nodes)),
    )
    out_specs = (whole, *(None if s is None or s.q is None else s.v for s in in_specs[2:]))
    pool, pending_out, node_out = pl.pallas_call(
        functools.partial(_kernel, _Static(kind, tile.head_dim, precision, depth, min_log_decay, interpret)),
        grid=(head_dim // tile.head_dim, num_heads, num_rows),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype if x is pool else jnp.float32), wants
        ),
        input_output_aliases={0: 0},
        compiler_params=triton.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
        name=f"ssm_nodes_{kind}",
    )(*args)
    none = jnp.zeros((num_rows, 0, num_heads, head_dim), jnp.float32)
    return pool, none if pending is None else pending_out, none if nodes is None else node_out


def _keep_jax_quiet():
    """JAX 0.11 and later warn when they lower a Triton kernel, which a user of this op can do nothing about.

    It happens after this call has returned, so the filter of that one message stays.
    """
    message = "The Pallas Triton backend is deprecated"
    warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)


def default_tile(pool, nodes, precision) -> Tile:
    """The tile for a pool and nodes of these shapes."""
    _, _, state_dim, head_dim = pool.shape
    if nodes is None:
        columns, num_warps = 4096 // state_dim, 4 if pool.dtype == jnp.float32 else 8
    elif precision == "exact":
        columns, num_warps = 8, 4
    else:
        # Wider tiles of 17 to 32 nodes spill less, of more nodes they spill more.
        columns = 64 if 16 < nodes.v.shape[1] <= 32 else 32
        num_warps = 4 if precision == "fast" and nodes.v.shape[1] <= 16 else 8
    return Tile(min(head_dim, max(columns, 8)), num_warps)


def _check(kind, pool, pending, nodes, precision, depth, min_log_decay):
    def refuse(why):
        raise NotImplementedError(f"ssm_nodes in Triton: {why}.")

    if count_heads(pool, pending, nodes) != pool.shape[1]:
        refuse(f"pools that hold heads side by side are for TPUs, got {pool.shape}")
    if any(size & (size - 1) for size in pool.shape[2:]):
        refuse(f"state_dim and head_dim must be powers of two, got {pool.shape[2:]}")
    if nodes is None:
        return
    num_nodes = nodes.v.shape[1]
    if precision == "exact":
        if num_nodes > _MAX_EXACT_NODES:
            refuse(f"'exact' takes up to {_MAX_EXACT_NODES} nodes, got {num_nodes}")
        return
    if min(pool.shape[2:]) < _MIN_SIDE:
        refuse(f"products need state_dim and head_dim of {_MIN_SIDE} or more, got {pool.shape[2:]}")
    factored = min_log_decay is not None and tiles.splits(min_log_decay, depth)
    if kind == "kda" and num_nodes > _MAX_PAIRWISE_NODES and not factored:
        refuse(
            f"without a bound on gates and depth that lets decays be factored, 'kda' takes up to "
            f"{_MAX_PAIRWISE_NODES} nodes, got {num_nodes}"
        )


def _row_spec(x):
    """All that belongs to a program's row."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda t, h, r: (r, *[0] * (x.ndim - 1)))


def _specs(tile, num_heads, inputs):
    """Blocks `[step]` and `[step, channel]` of a program's inputs."""
    if inputs is None:
        return None
    _, steps, key_heads, state_dim = inputs.k.shape
    group = num_heads // key_heads
    keys = pl.BlockSpec((None, steps, None, state_dim), lambda t, h, r: (r, 0, h // group, 0))
    channels = pl.BlockSpec((None, steps, None, state_dim), lambda t, h, r: (r, 0, h, 0))
    numbers = pl.BlockSpec((None, steps, None), lambda t, h, r: (r, 0, h))
    return inputs._replace(
        q=None if inputs.q is None else keys,
        k=keys,
        v=pl.BlockSpec((None, steps, None, tile), lambda t, h, r: (r, 0, h, t)),
        log_decay=channels if inputs.log_decay.ndim == 4 else numbers,
        beta=None if inputs.beta is None else numbers,
    )


def _kernel(static, _, plan, pending, nodes, pool, pending_out, node_out):
    columns = pl.ds(pl.program_id(0) * static.tile, static.tile)
    read_slot, write_slot = plan.read_slot[...], plan.write_slot[...]
    head = pl.program_id(1)

    def store(slot, state):
        pool[slot, head, :, columns] = state.astype(pool.dtype)

    live = jnp.full((pool.shape[2], static.tile), read_slot != 0)
    state = triton.load(pool.at[read_slot, head, :, columns], mask=live, other=0)
    product = rounded_product(plan.pending_len[...])
    state = state.astype(jnp.float32)
    if pending is not None:
        state = _fold(static, state, pending, plan, pool.dtype, product, store, pending_out)

    @pl.when(write_slot != 0)
    def _():
        store(write_slot, state)

    if nodes is None:
        return
    if static.precision == "exact":
        _node_by_node(static, state, nodes, plan, pool.dtype, product, node_out)
    else:
        _masked(static, state, nodes, plan, node_out)


def _fold(static, state, pending, plan, dtype, product, store, out):
    """Phase 1: the folded state."""
    length, track_slot, track_len = plan.pending_len[...], plan.track_slot[...], plan.track_len[...]

    def fold(step, state):
        state = _token(static, state, pending, step, product)
        if out is not None:
            out[step, :] = _output(state, pending, step, product)
        state = _rounded(static, state, dtype)

        @pl.when((track_slot != 0) & (track_len == step + 1))
        def _():
            store(track_slot, state)

        return state

    state = jax.lax.fori_loop(0, length, fold, state)
    if out is not None:
        _clear(out, length)
    return state


def _node_by_node(static, folded, nodes, plan, dtype, product, out):
    """Phase 2, "exact": the states of all nodes are in registers."""
    length = plan.node_len[...]
    size = pl.next_power_of_2(nodes.v.shape[0])
    index = jax.lax.broadcasted_iota(jnp.int32, (size, *folded.shape), 0)

    def node(n, states):
        parent = plan.parent[n]
        # All but one of the numbers added are 0, and as integers they keep its bits.
        bits = jax.lax.bitcast_convert_type(states, jnp.int32)
        of_parent = jnp.sum(jnp.where(index == parent, bits, 0), axis=0)
        of_parent = jax.lax.bitcast_convert_type(of_parent, jnp.float32)
        state = _token(static, jnp.where(parent < 0, folded, of_parent), nodes, n, product)
        out[n, :] = _output(state, nodes, n, product)
        state = _rounded(static, state, dtype)
        return jnp.where(index == n, state[None], states)

    jax.lax.fori_loop(0, length, node, jnp.zeros(index.shape, jnp.float32))
    _clear(out, length)


def _masked(static, state, nodes, plan, out):
    """Phase 2 in matrix products; `plan.parent` is the ancestor mask."""
    num_nodes = nodes.v.shape[0]
    size = max(pl.next_power_of_2(num_nodes), _MIN_SIDE)
    node = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    live = node < plan.node_len[...]

    def load(ref):
        if ref is None:
            return None
        if len(ref.shape) == 1:
            return triton.load(ref.at[pl.ds(0, size)], mask=live[:, 0], other=0).astype(jnp.float32)[:, None]
        mask = jnp.broadcast_to(live, (size, ref.shape[1]))
        return triton.load(ref.at[pl.ds(0, size), :], mask=mask, other=0).astype(jnp.float32)

    of_column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1) < num_nodes
    ancestors = triton.load(
        plan.parent.at[pl.ds(0, size), pl.ds(0, size)], mask=(node < num_nodes) & of_column, other=0
    )
    q, k, v, log_decay, beta = (load(ref) for ref in nodes)
    dot, sum_dot = _products(static.precision, static.interpret)
    got = tiles.node_outputs(
        static.kind,
        state,
        q,
        k,
        v,
        log_decay,
        beta,
        ancestors,
        depth=static.depth,
        min_log_decay=static.min_log_decay,
        dot=dot,
        sum_dot=sum_dot,
    )
    inside = jnp.broadcast_to(node < num_nodes, got.shape)
    triton.store(out.at[pl.ds(0, size), :], jnp.where(live, got, 0.0), mask=inside)


def _products(precision, interpret):
    """`tiles.products` for Triton, where "float32" takes three TF32 passes; sums of decays always do."""
    one_pass = tiles.make_dot(jax.lax.Precision.DEFAULT)
    # XLA on the CPU does not know such passes, and its one pass is float32.
    three_passes = one_pass if interpret else tiles.make_dot(jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3)

    def sum_dot(x, y):
        # A column is too narrow for a matrix unit.
        return jnp.sum(x * y.reshape(1, -1), axis=1, keepdims=True) if y.shape[1] == 1 else three_passes(x, y)

    return (one_pass if precision == "fast" else three_passes), sum_dot


def _token(static, state, inputs, step, product):
    """The state after token `step`, not rounded."""
    k = inputs.k[step, :].astype(jnp.float32)[:, None]
    v = inputs.v[step, :].astype(jnp.float32)[None, :]
    if static.kind == "kda":
        log_decay = inputs.log_decay[step, :].astype(jnp.float32)[:, None]
    else:
        log_decay = inputs.log_decay[step].astype(jnp.float32)
    beta = None if inputs.beta is None else inputs.beta[step].astype(jnp.float32)
    return advance(static.kind, state, k, v, log_decay, beta, product=product, sum_rows=_sum_rows)


def _output(state, inputs, step, product):
    q = inputs.q[step, :].astype(jnp.float32)[:, None]
    return read_out(state, q, product=product, sum_rows=_sum_rows)[0]


def _sum_rows(x):
    """`recurrence.tree_sum` of a power of two of rows, without the slices that Triton does not have."""
    while x.shape[0] > 1:
        first, second = jax.lax.split(x, (x.shape[0] // 2,) * 2)
        x = first + second
    return x


def _rounded(static, state, dtype):
    # Triton keeps a pair of casts, XLA on the CPU does not.
    return round_state(state, dtype) if static.interpret else state.astype(dtype).astype(jnp.float32)


def _clear(out, start):
    def clear(step, _):
        out[step, :] = jnp.zeros(out.shape[1:], out.dtype)

    jax.lax.fori_loop(start, out.shape[0], clear, None)
