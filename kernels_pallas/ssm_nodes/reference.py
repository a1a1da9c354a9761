"""`ssm_nodes` token by token, with the state of every token and node kept: the definition.

`ssm_nodes_snapshots` gives those states to the caller, who commits one by gathering it: how other systems
verify drafts, at the price of a state a node in memory. It is here to compare with.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.recurrence import advance, by_head, key_column, lone_exp, read_out, rounded_product
from kernels_pallas.ssm_nodes.packed import count_heads, pack, unpack
from kernels_pallas.ssm_nodes.plan import Inputs, NodesPlan


def ssm_nodes(kind, pool, pending, nodes, plan, *, precision, depth, min_log_decay):
    """See `api.ssm_nodes`; every precision is exact here."""
    del precision, depth, min_log_decay
    rows = jnp.arange(plan.read_slot.shape[0])
    start = read_states(pool, plan.read_slot, count_heads(pool, pending, nodes))
    chain, pending_out = _chain(kind, start, pending, plan, pool.dtype)
    folded, tracked = chain[plan.pending_len, rows], chain[plan.track_len, rows]
    _, node_out = _tree(kind, folded, nodes, plan, pool.dtype)
    pool = pool.at[plan.write_slot].set(pack(folded, pool))
    return pool.at[plan.track_slot].set(pack(tracked, pool)), pending_out, node_out


def ssm_nodes_snapshots(
    kind: str, pool: Float[Array, "slot head state_dim head_dim"], nodes: Inputs, plan: NodesPlan
) -> tuple[Float32[Array, "row node head head_dim"], Float[Array, "row node head state_dim head_dim"]]:
    """The outputs and the states of all nodes, of the states that the pool holds; nothing is pending."""
    states, out = _tree(kind, read_states(pool, plan.read_slot, pool.shape[1]), nodes, plan, pool.dtype)
    return out, jnp.moveaxis(states, 0, 1).astype(pool.dtype)


def commit_snapshots(
    pool: Float[Array, "slot head state_dim head_dim"],
    snapshots: Float[Array, "row node head state_dim head_dim"],
    node: Int32[Array, " row"],
    write_slot: Int32[Array, " row"],
) -> Float[Array, "slot head state_dim head_dim"]:
    """Writes the state of each row's `node` to its slot."""
    return pool.at[write_slot].set(snapshots[jnp.arange(len(node)), node])


def read_states(pool, slots, num_heads):
    """The states of `slots` as float32, head by head; slot 0 reads as zero whatever it holds."""
    states = unpack(pool.at[slots].get(mode="promise_in_bounds"), num_heads)
    return jnp.where((slots != 0)[:, None, None, None], states.astype(jnp.float32), 0.0)


def round_state(state, dtype):
    """A float32 state as the pool would give it back. XLA may drop a pair of casts, but not this."""
    return jax.lax.reduce_precision(state, 8, 7) if dtype == jnp.bfloat16 else state


def _chain(kind, state, pending, plan, dtype):
    """States after 0, 1, ... pending tokens, `[D + 1, row, ...]`, and the outputs."""
    if pending is None:
        return state[None], _no_outputs(state)
    product = rounded_product(plan.pending_len)

    def step(state, now):
        state = token(kind, state, now, product)
        out = None if now.q is None else output(state, now, product)
        state = round_state(state, dtype)
        return state, (state, out)

    _, (states, outs) = jax.lax.scan(step, state, _by_step(pending))
    outs = None if outs is None else _outputs(outs, plan.pending_len)
    return jnp.concatenate([state[None], states]), outs


def _tree(kind, folded, nodes, plan, dtype):
    """States of the nodes, `[node, row, ...]`, and their outputs."""
    if nodes is None:
        return folded[None, :0], _no_outputs(folded)
    product = rounded_product(plan.pending_len)
    rows, num_nodes = jnp.arange(folded.shape[0]), nodes.v.shape[1]
    states = jnp.concatenate([folded[None], jnp.zeros((num_nodes, *folded.shape), jnp.float32)])

    def step(states, now):
        node, parent, inputs = now
        state = token(kind, states[jnp.clip(parent + 1, 0, node), rows], inputs, product)
        return states.at[node + 1].set(round_state(state, dtype)), output(state, inputs, product)

    steps = (jnp.arange(num_nodes, dtype=jnp.int32), plan.parent.T, _by_step(nodes))
    states, outs = jax.lax.scan(step, states, steps)
    return states[1:], _outputs(outs, plan.node_len)


def _by_step(inputs):
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)


def token(kind, state, inputs, product):
    """The states `[..., head, state_dim, head_dim]` after one token, not rounded."""
    _, k, v, log_decay, beta = inputs
    heads = by_head(kind, v.shape[-2], k, v, log_decay, beta)
    return advance(kind, state, *heads, product=product, exp=lone_exp)


def output(state, inputs, product):
    """The outputs `[..., head, head_dim]` of the token whose states these are."""
    return read_out(state, key_column(state.shape[-3], inputs.q), product=product)[..., 0, :]


def _outputs(outs, length):
    """Outputs by step as outputs by row, 0 behind the row's length."""
    live = jnp.arange(outs.shape[0])[None, :] < length[:, None]
    return jnp.where(live[:, :, None, None], jnp.moveaxis(outs, 0, 1), 0.0)


def _no_outputs(state):
    num_rows, num_heads, _, head_dim = state.shape
    return jnp.zeros((num_rows, 0, num_heads, head_dim), jnp.float32)
