"""`ssm_nodes` for XLA, on any platform.

Phase 1 gathers the rows' states once, folds all rows token by token, and scatters them into the donated
pool; a tracked state is written from inside the loop. Phase 2 maps `tiles.node_outputs` over rows and
heads; "exact" goes row by row and node by node, and keeps the node states of one row at a time.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.recurrence import rounded_product
from kernels_pallas.ssm_nodes.packed import count_heads, pack
from kernels_pallas.ssm_nodes.reference import output, read_states, round_state, token
from kernels_pallas.ssm_nodes.tiles import node_outputs, products
from kernels_pallas.ssm_nodes.tree import ancestor_mask


def ssm_nodes(kind, pool, pending, nodes, plan, *, precision, depth, min_log_decay):
    """See `api.ssm_nodes`."""
    state = read_states(pool, plan.read_slot, count_heads(pool, pending, nodes))
    num_rows, num_heads, _, head_dim = state.shape
    pending_out = node_out = jnp.zeros((num_rows, 0, num_heads, head_dim), jnp.float32)
    if pending is not None:
        pool, state, pending_out = _fold(kind, pool, state, pending, plan)
    pool = pool.at[plan.write_slot].set(pack(state, pool), mode="promise_in_bounds")
    if nodes is not None and precision == "exact":
        node_out = _node_by_node(kind, state, nodes, plan, pool.dtype)
    elif nodes is not None:
        dot, sum_dot = products(precision)
        node_out = masked_outputs(
            kind, state, nodes, plan, depth=depth, min_log_decay=min_log_decay, dot=dot, sum_dot=sum_dot
        )
    return pool, pending_out, node_out


def _fold(kind, pool, state, pending, plan):
    """Phase 1: the pool with tracked states, the folded states, and the outputs or None."""
    product = rounded_product(plan.pending_len)
    # A row's outputs behind its length stay 0.
    out = None if pending.q is None else jnp.zeros(pending.v.shape, jnp.float32)

    def fold(step, carry):
        pool, state, out = carry
        live = (step < plan.pending_len)[:, None, None, None]
        inputs = _at(pending, step, axis=1)
        after = token(kind, state, inputs, product)
        if out is not None:
            kept = jnp.where(live[..., 0], output(after, inputs, product), 0.0)
            out = jax.lax.dynamic_update_index_in_dim(out, kept, step, 1)
        state = jnp.where(live, round_state(after, pool.dtype), state)
        tracks = (plan.track_slot != 0) & (plan.track_len == step + 1)
        return _write_some(pool, state, plan.track_slot, tracks), state, out

    carry = pool, state, out
    if pending.v.shape[1] == 1:
        # A loop would copy the states that it carries.
        return fold(jnp.int32(0), carry)
    return jax.lax.fori_loop(jnp.int32(0), jnp.max(plan.pending_len), fold, carry)


def _write_some(pool, state, slots, chosen):
    """Writes the chosen rows' states, one after another: mostly there is none, and nothing is moved."""
    first = jnp.argsort(~chosen, stable=True)

    def write(n, pool):
        row = first[n]
        return jax.lax.dynamic_update_index_in_dim(pool, pack(state[row], pool), slots[row], 0)

    return jax.lax.fori_loop(jnp.int32(0), jnp.sum(chosen, dtype=jnp.int32), write, pool)


def _node_by_node(kind, folded, nodes, plan, dtype):
    """Phase 2, "exact"."""
    product = rounded_product(plan.pending_len)

    def row(r, carry):
        inputs = _at(nodes, r, axis=0)

        def node(n, carry):
            # What is written here is the node before, so that nothing of this buffer is read before it is
            # written: XLA would copy all of it for every node.
            out, states, last = carry
            states = jax.lax.dynamic_update_index_in_dim(states, last, n, 0)
            now = _at(inputs, n, axis=0)
            state = token(kind, states[plan.parent[r, n] + 1], now, product)
            return out.at[r, n].set(output(state, now, product)), states, round_state(state, dtype)

        out, states = carry
        return jax.lax.fori_loop(jnp.int32(0), plan.node_len[r], node, (out, states, folded[r]))[:2]

    out = jnp.zeros(nodes.v.shape, jnp.float32)
    states = jnp.zeros((plan.parent.shape[1], *folded.shape[1:]), jnp.float32)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(folded.shape[0]), row, (out, states))[0]


def masked_outputs(kind, folded, nodes, plan, *, depth, min_log_decay, dot, sum_dot):
    """Phase 2 with ancestor masks, with any products: `tiles.node_outputs` of every row and head."""
    num_rows, num_nodes, key_heads, _ = nodes.k.shape
    num_heads = nodes.v.shape[2]
    live = jnp.arange(num_nodes, dtype=jnp.int32)[None, :] < plan.node_len[:, None]
    ancestors = ancestor_mask(plan.parent, plan.node_len, depth)

    def by_key_head(x, heads):
        """`[row, node, head, channel]` to float32 `[row, key_head, group, node, channel]`."""
        x = jnp.where(live[:, :, None, None], x.astype(jnp.float32), 0.0)
        return jnp.moveaxis(x.reshape(num_rows, num_nodes, key_heads, heads // key_heads, -1), 1, 3)

    def per_head(x):
        return None if x is None else by_key_head(x if x.ndim == 4 else x[..., None], num_heads)

    q, k = (by_key_head(x, key_heads)[:, :, 0] for x in (nodes.q, nodes.k))
    v, log_decay, beta = (per_head(x) for x in (nodes.v, nodes.log_decay, nodes.beta))
    state = folded.reshape(num_rows, key_heads, num_heads // key_heads, *folded.shape[2:])
    tile = functools.partial(
        node_outputs, kind, depth=depth, min_log_decay=min_log_decay, dot=dot, sum_dot=sum_dot
    )
    # What the heads of a key head share is computed once, and so is what all heads of a row share.
    own = None if beta is None else 0
    tile = jax.vmap(tile, in_axes=(0, None, None, 0, 0, own, None))
    tile = jax.vmap(tile, in_axes=(0, 0, 0, 0, 0, own, None))
    out = jax.vmap(tile, in_axes=(0, 0, 0, 0, 0, own, 0))(state, q, k, v, log_decay, beta, ancestors)
    return jnp.moveaxis(out, 3, 1).reshape(num_rows, num_nodes, num_heads, -1)


def _at(inputs, index, axis):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False), inputs)
