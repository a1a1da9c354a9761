"""`ssm_scan` in chunks, for XLA on any platform: one chunk is one block.

What a block does to itself is computed for all blocks at once, in matmuls. A scan over blocks then carries
the rows' states. With `D[i, j]` the decay from token `j` to token `i >= j`, `G[i]` the decay from the block's
start through token `i`, and `S` the state at the start:

    (I + strictly_lower(beta_i D[i, j] k_i.k_j)) u = beta (v - (G k)^T S)        "mamba2": u = v
    o_i = S^T (G_i q_i) + sum_{j <= i} (D[i, j] q_i.k_j) u_j
    S_p = G_p S + sum_{j <= p} D[p, j] k_j (x) u_j                               for the end and each export

Nothing divides by a decay, so nothing overflows and gradients stay finite however fast a state decays.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.ssm_scan.dot import dot
from kernels_pallas.ssm_scan.inverse import unit_lower_inverse
from kernels_pallas.ssm_scan.scores import channel_decay_scores, scalar_decay_scores


def ssm_scan(kind, q, k, v, log_decay, beta, initial, blocks):
    """See `api.ssm_scan`."""
    num_rows, num_heads, state_dim, head_dim = initial.shape
    num_tokens, key_heads = q.shape[1:3]
    groups, num_exports = num_heads // key_heads, blocks.export.shape[1]

    # [block, key_head, group, token, channel]; padding tokens neither decay nor write.
    valid = blocks.valid(num_tokens)
    if kind != "kda":
        log_decay = log_decay[..., None]
    q, k = (_head_major(x, valid, key_heads, 1) for x in (q, k))
    v, log_decay = (_head_major(x, valid, key_heads, groups) for x in (v, log_decay))
    # exp(-200) is 0 in float32, as exp(-inf) is, and stays finite when it is summed or multiplied by 0.
    log_decay = jnp.maximum(log_decay, -200.0)
    scores = channel_decay_scores if kind == "kda" else scalar_decay_scores
    qk, kk, from_start = scores(q, k, log_decay)
    solve = None
    if kind != "mamba2":
        beta = _head_major(beta[..., None], valid, key_heads, groups)
        solve = unit_lower_inverse(beta * kk) * jnp.swapaxes(beta, -1, -2)

    ends = jnp.concatenate([blocks.length[:, None], blocks.export], axis=1)
    # Exports that are not asked for are written past the last one.
    trash = num_rows * num_exports
    at = blocks.row[:, None] * num_exports + jnp.arange(num_exports, dtype=jnp.int32)[None, :]
    at = jnp.where(blocks.export > 0, at, trash)

    def block(carry, x):
        states, exports = carry
        row, at, ends, q, k, u, qk, solve, from_start, log_decay = x
        state = jax.lax.dynamic_index_in_dim(states, row, keepdims=False)
        out = dot("ngqk,ngkv->ngqv", q * from_start, state)
        if solve is not None:
            u = dot("ngij,ngjv->ngiv", solve, u - dot("ngqk,ngkv->ngqv", k * from_start, state))
        out = out + dot("ngij,ngjv->ngiv", qk, u)
        ends = _states_after(ends, k, u, log_decay, state)
        states = jax.lax.dynamic_update_index_in_dim(states, ends[0], row, 0)
        for e in range(num_exports):
            exports = jax.lax.dynamic_update_index_in_dim(exports, ends[1 + e], at[e], 0)
        return (states, exports), out

    heads = (key_heads, groups, state_dim, head_dim)
    states = jnp.concatenate([initial, jnp.zeros_like(initial[:1])]).reshape(num_rows + 1, *heads)
    exports = jnp.zeros((trash + 1, *heads), jnp.float32)
    xs = (blocks.row, at, ends, q, k, v, qk, solve, from_start, log_decay)
    (states, exports), out = jax.lax.scan(block, (states, exports), xs)
    out = jnp.moveaxis(out, 3, 1).reshape(-1, num_tokens, num_heads, head_dim)
    out = jnp.where(valid[:, :, None, None], out, 0.0)
    exports = exports[:trash].reshape(num_rows, num_exports, *initial.shape[1:])
    return out, states[:num_rows].reshape(initial.shape), exports


def _head_major(x, valid, key_heads, groups):
    """`[block, token, head, channel]` to `[block, key_head, group, token, channel]`, padding tokens to 0."""
    num_blocks, num_tokens, _, channels = x.shape
    x = jnp.where(valid[:, :, None, None], x, 0.0)
    return jnp.moveaxis(x.reshape(num_blocks, num_tokens, key_heads, groups, channels), 1, 3)


def _states_after(ends, k, u, log_decay, state):
    """The states after `ends[e]` tokens of one block, `[end, key_head, group, state_dim, head_dim]`.

    All ends are one batch of the same products, so that an export has the bits of a row that ends there.
    """
    num_ends, num_tokens = ends.shape[0], k.shape[-2]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    until = (token[None, :] < ends[:, None]).astype(jnp.float32)
    behind = until[:, None, :] * (token[None, :] > token[:, None]).astype(jnp.float32)[None]

    def many(x):
        return jnp.broadcast_to(x, (num_ends, *x.shape))

    def by_head(x):
        return jnp.broadcast_to(x[:, None, None], (num_ends, *u.shape[:2], *x.shape[1:]))

    decay = jnp.exp(dot("engl,englc->engc", by_head(until), many(log_decay)))
    to_end = jnp.exp(dot("engjl,englc->engjc", by_head(behind), many(log_decay)))
    keys = until[:, None, None, :, None] * to_end * k[None]
    return decay[..., None] * state[None] + dot("engqk,engqv->engkv", keys, many(u))
