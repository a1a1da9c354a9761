"""`ssm_nodes` for TPUs, in Pallas for Mosaic: one pass over the states.

The grid goes through rows and tiles of heads. A step's states are fetched from the read slot by DMA while
the step before computes, folded token by token, looked ahead from, and sent to the write slot in place on
the donated pool; that transfer, and the one of a tracked state, is waited for two steps later. So a state is
read once and written once, and what is not asked for is not moved: slot 0 is neither read nor written.

What reads and writes a state is indexed by sublanes there, so the keys, queries and KDA's decays of tokens
that go one by one come as columns, 128 to an array `[state_dim, 128]`; one lane is spread over all lanes
when its token is computed. Nodes in matmul form come as they are, `[node, channel]` for each head.

Where JAX does not run on a TPU the kernel is interpreted, for tests; bits are then those of "reference".
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.dispatch import current_platform
from kernels_pallas.ssm_nodes.packed import count_heads
from kernels_pallas.ssm_nodes.tiles import SPLIT_RANGE
from kernels_pallas.ssm_nodes.tpu_kernel import LANES, Tile, kernel
from kernels_pallas.ssm_nodes.tree import ancestor_mask

MAX_NODES = 64
MAX_PAIRWISE_NODES = 16
MAX_VMEM_BYTES = 56 * 2**20


def ssm_nodes(kind, pool, pending, nodes, plan, *, precision, depth, min_log_decay):
    """See `api.ssm_nodes`."""
    num_rows, num_nodes = plan.parent.shape
    _, packs, state_dim, lanes = pool.shape
    num_heads = count_heads(pool, pending, nodes)
    packed = num_heads // packs
    key_heads = next((x.k.shape[2] for x in (pending, nodes) if x is not None), num_heads)
    if any(x is not None and x.k.shape[2] != key_heads for x in (pending, nodes)):
        raise NotImplementedError("ssm_nodes on TPU: pending tokens and nodes must have the same key heads.")
    exact = precision == "exact"
    _refuse_nodes(kind, num_nodes, exact, depth, min_log_decay)
    groups = num_heads // key_heads
    if packed > 1 and (kind == "kda" or groups % packed):
        raise NotImplementedError(
            "ssm_nodes on TPU: heads side by side must share their keys and decays' form."
        )
    interpret = current_platform() != "tpu"
    _refuse_tiles(pool, interpret)
    tile = Tile(
        kind=kind,
        precision=precision,
        num_rows=num_rows,
        packed=packed,
        num_heads=packs,
        heads=_heads_of_a_step(packs, groups // packed),
        groups=groups // packed,
        num_pending=0 if pending is None else pending.v.shape[1],
        num_nodes=num_nodes,
        depth=depth,
        min_log_decay=min_log_decay,
        interpret=interpret,
    )
    pending, nodes = (None if x is None else _packed(tile, x) for x in (pending, nodes))
    outs, out_specs = {}, {}
    inputs, specs = {}, {}
    if pending is not None:
        inputs["pending"], specs["pending"] = _one_by_one(tile, pending)
        if pending.q is not None:
            outs["pending"] = jax.ShapeDtypeStruct(pending.v.shape, jnp.float32)
            out_specs["pending"] = _token_major(tile, pending.v.shape)
    if nodes is not None and exact:
        inputs["nodes"], specs["nodes"] = _one_by_one(tile, nodes)
        outs["nodes"] = jax.ShapeDtypeStruct(nodes.v.shape, jnp.float32)
        out_specs["nodes"] = _token_major(tile, nodes.v.shape)
    elif nodes is not None:
        inputs["nodes"], specs["nodes"] = _in_matmuls(tile, nodes, plan)
        outs["nodes"] = jax.ShapeDtypeStruct(inputs["nodes"]["v"].shape, jnp.float32)
        out_specs["nodes"] = specs["nodes"]["v"]

    states = (2, tile.heads, state_dim, lanes)
    scratch = {
        "read": pltpu.VMEM(states, pool.dtype),
        "write": pltpu.VMEM(states, pool.dtype),
        "track": pltpu.VMEM(states, pool.dtype),
        "moved": pltpu.SemaphoreType.DMA((4, 2)),
    }
    if nodes is not None and exact:
        tree = (num_nodes + 1, tile.chain_heads, state_dim, lanes)
        scratch["tree"] = pltpu.VMEM(tree, jnp.float32)
    vmem = _vmem_bytes(scratch, specs, out_specs)
    if vmem > MAX_VMEM_BYTES:
        raise NotImplementedError(
            f"ssm_nodes on TPU: a step's {tile.heads} heads of {packs} take {vmem} bytes of VMEM, "
            f"at most {MAX_VMEM_BYTES} are used."
        )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(kernel, tile),
        out_shape=(jax.ShapeDtypeStruct(pool.shape, pool.dtype), outs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(num_rows, tile.parts),
            in_specs=(anywhere, specs),
            out_specs=(anywhere, out_specs),
            scratch_shapes=[scratch],
        ),
        input_output_aliases={len(plan): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=max(16 * 2**20, vmem + 8 * 2**20),
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"ssm_nodes_{kind}",
    )
    # Flat, as scalar memory pads two axes to whole tiles; where it is not looked at, one number.
    parent = plan.parent.reshape(-1) if exact and num_nodes else jnp.zeros((1,), jnp.int32)
    pool, outs = call(*plan._replace(parent=parent), pool, inputs)
    none = jnp.zeros((num_rows, 0, num_heads, lanes // packed), jnp.float32)
    pending_out, node_out = none if pending is None else None, none
    if "pending" in outs:
        pending_out = _outputs(tile, outs["pending"], plan.pending_len)
    if "nodes" in outs:
        node_out = outs["nodes"] if exact else jnp.moveaxis(outs["nodes"], 1, 2)[:, :num_nodes]
        node_out = _outputs(tile, node_out, plan.node_len)
    return pool, pending_out, node_out


def _refuse_nodes(kind, num_nodes, exact, depth, min_log_decay):
    if num_nodes > MAX_NODES:
        raise NotImplementedError(f"ssm_nodes on TPU: at most {MAX_NODES} nodes, got {num_nodes}.")
    splits = min_log_decay is not None and -min_log_decay * depth <= SPLIT_RANGE
    if kind == "kda" and not exact and not splits and num_nodes > MAX_PAIRWISE_NODES:
        raise NotImplementedError(
            f"ssm_nodes on TPU: 'kda' with {num_nodes} nodes needs depth * -min_log_decay <= {SPLIT_RANGE}, "
            f"got depth {depth} and min_log_decay {min_log_decay}; without it, at most {MAX_PAIRWISE_NODES}."
        )


def _refuse_tiles(pool, interpret):
    _, _, state_dim, lanes = pool.shape
    rows = 32 // pool.dtype.itemsize
    if state_dim % rows or state_dim & (state_dim - 1):
        raise NotImplementedError(
            f"ssm_nodes on TPU: state_dim must be a power of two of at least {rows} for {pool.dtype}, "
            f"got {state_dim}."
        )
    if lanes % LANES and not interpret:
        raise NotImplementedError(
            f"ssm_nodes on TPU: the pool's last axis must be a multiple of {LANES}, got {lanes}, as "
            "XLA would re-lay the whole pool; put heads side by side."
        )


def _heads_of_a_step(num_heads, groups):
    """Heads whose states one grid step moves: 8, which cuts key heads evenly and fits sublanes, or all."""
    fits = num_heads % 8 == 0 and (8 % groups == 0 or groups % 8 == 0)
    return 8 if fits else num_heads


def _one_by_one(tile, tokens):
    """Inputs of tokens that go one by one, and their blocks."""
    q, k, v, log_decay, beta = tokens
    arrays = {"k": _columns(k), "v": v.astype(jnp.float32)}
    if q is not None:
        arrays["q"] = _columns(q)
    scalars = {} if beta is None else {"beta": beta.astype(jnp.float32)}
    if tile.kind == "kda":
        arrays["log_decay"] = _columns(log_decay)
    else:
        scalars["log_decay"] = log_decay.astype(jnp.float32)
    specs = {name: _whole_row(x.shape) for name, x in arrays.items() if name != "v"}
    specs["v"] = _token_major(tile, v.shape)
    specs |= {name: _whole_row(x.shape, pltpu.SMEM) for name, x in scalars.items()}
    return arrays | scalars, specs


def _in_matmuls(tile, nodes, plan):
    """Inputs of nodes in matmul form, padded to whole sublanes, and their blocks; padding nodes hold 0."""
    num_nodes = plan.parent.shape[1]
    padding = -num_nodes % 8
    live = jnp.arange(num_nodes, dtype=jnp.int32)[None, :] < plan.node_len[:, None]

    def padded(x):
        mask = live.reshape(live.shape + (1,) * (x.ndim - 2))
        x = jnp.where(mask, x.astype(jnp.float32), 0.0)
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

    q, k, v, log_decay = (padded(x) for x in (nodes.q, nodes.k, nodes.v, nodes.log_decay))
    mask = ancestor_mask(plan.parent, plan.node_len, tile.depth)
    arrays = {
        "q": jnp.moveaxis(q, 2, 1),
        "k": jnp.moveaxis(k, 2, 1),
        "v": jnp.moveaxis(v, 2, 1),
        "ancestors": jnp.pad(mask, [(0, 0), (0, padding), (0, padding)]),
    }
    specs = {
        "q": _head_major(tile, arrays["q"].shape),
        "k": _head_major(tile, arrays["k"].shape),
        "v": _head_major(tile, arrays["v"].shape),
        "ancestors": _whole_row(arrays["ancestors"].shape),
    }
    if tile.kind == "kda":
        arrays["log_decay"] = jnp.moveaxis(log_decay, 2, 1)
        specs["log_decay"] = _head_major(tile, arrays["log_decay"].shape)
    else:
        arrays["log_decay"] = log_decay
        specs["log_decay"] = _whole_row(log_decay.shape)
    if nodes.beta is not None:
        arrays["beta"] = padded(nodes.beta)
        specs["beta"] = _whole_row(arrays["beta"].shape)
    return arrays, specs


def _columns(x):
    """`[row, step, head, channel]` as `[row, lanes, channel, 128]`: column `head * steps + step`."""
    num_rows, steps, heads, channels = x.shape
    x = jnp.transpose(x.astype(jnp.float32), (0, 3, 2, 1)).reshape(num_rows, channels, heads * steps)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -(heads * steps) % LANES)])
    return jnp.moveaxis(x.reshape(num_rows, channels, -1, LANES), 2, 1)


def _whole_row(shape, memory_space=None):
    """All of a row's array, the same for its tiles of heads."""
    block = (1, *shape[1:])
    zeros = (0,) * len(shape[1:])
    space = {} if memory_space is None else {"memory_space": memory_space}
    return pl.BlockSpec(block, lambda row, part, *plan: (row, *zeros), **space)


def _token_major(tile, shape):
    """`[row, step, head, channel]` by tiles of heads."""
    return pl.BlockSpec((1, shape[1], tile.heads, shape[3]), lambda row, part, *plan: (row, 0, part, 0))


def _head_major(tile, shape):
    """`[row, head, node, channel]` by tiles of heads, or of the key heads that those use."""
    per_head = tile.num_heads // shape[1]
    heads = max(1, tile.heads // per_head)
    steps_of_a_head = max(1, per_head // tile.heads)
    return pl.BlockSpec((1, heads, *shape[2:]), lambda row, part, *plan: (row, part // steps_of_a_head, 0, 0))


def _packed(tile, tokens):
    """The inputs with `v` as the pool's tiles have it."""
    rows, steps, _, head_dim = tokens.v.shape
    return tokens._replace(v=tokens.v.reshape(rows, steps, tile.num_heads, tile.packed * head_dim))


def _outputs(tile, out, length):
    """Outputs head by head, 0 behind the row's length, where nothing was written."""
    rows, steps, packs, lanes = out.shape
    live = jnp.arange(steps, dtype=jnp.int32)[None, :] < length[:, None]
    out = jnp.where(live[:, :, None, None], out, 0.0)
    return out.reshape(rows, steps, packs * tile.packed, lanes // tile.packed)


def _vmem_bytes(scratch, *specs):
    """What the buffers take, blocks twice, padded to tiles of 8 by 128 numbers of four bytes."""

    def padded(shape, itemsize):
        *lead, rows, lanes = shape
        sublanes = 32 // itemsize
        return math.prod(lead) * -(-rows // sublanes) * -(-lanes // LANES) * 32 * LANES

    blocks = [s for s in jax.tree.leaves(specs) if s.memory_space != pltpu.SMEM]
    buffers = [s for name, s in scratch.items() if name != "moved"]
    return sum(2 * padded(s.block_shape, 4) for s in blocks) + sum(
        padded(s.shape, s.dtype.itemsize) for s in buffers
    )
