"""`ssm_scan` token by token: the definition, and what deterministic mode runs.

Sums over `state_dim` are an explicit tree of additions and the loops have dynamic bounds, so that a token's
bits depend on neither the number of rows nor the length of the scan (`jnp.sum`, dots and loops of one
iteration are compiled differently for different shapes). Not differentiable in reverse.
"""

import jax
import jax.numpy as jnp


def advance(kind, state, q, k, v, log_decay, beta):
    """One token of every row: `(out, state)`. Leading axes are free; float32 throughout."""
    groups = v.shape[-2] // k.shape[-2]
    q, k = (jnp.repeat(x, groups, axis=-2)[..., None] for x in (q, k))
    state = state * jnp.exp(log_decay[..., None] if kind == "kda" else log_decay[..., None, None])
    u = v if kind == "mamba2" else beta[..., None] * (v - _tree_sum(state * k))
    state = state + k * u[..., None, :]
    return _tree_sum(state * q), state


def _tree_sum(x):
    """Sum over the last axis but one, halves onto halves."""
    size = x.shape[-2]
    width = 1 << (size - 1).bit_length()
    if width > size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, width - size), (0, 0)])
    while width > 1:
        width //= 2
        x = x[..., :width, :] + x[..., width:, :]
    return x[..., 0, :]


def ssm_scan(kind, q, k, v, log_decay, beta, initial, blocks):
    """See `api.ssm_scan`."""
    num_rows, num_exports = initial.shape[0], blocks.export.shape[1]
    states = jnp.concatenate([initial, jnp.zeros((1, *initial.shape[1:]), jnp.float32)])
    # Exports that are not asked for are written past the last one.
    trash = num_rows * num_exports
    exports = jnp.zeros((trash + 1, *initial.shape[1:]), jnp.float32)
    inputs = (q, k, v, log_decay, beta)

    def token(t, carry, block):
        out, state, exports = carry
        now = (None if x is None else x[block, t] for x in inputs)
        y, state = advance(kind, state, *now)
        for e in range(num_exports):
            at = jnp.where(blocks.export[block, e] == t + 1, blocks.row[block] * num_exports + e, trash)
            exports = exports.at[at].set(state)
        return out.at[block, t].set(y), state, exports

    def block(b, carry):
        out, states, exports = carry
        row = blocks.row[b]
        out, state, exports = jax.lax.fori_loop(
            jnp.int32(0), blocks.length[b], lambda t, c: token(t, c, b), (out, states[row], exports)
        )
        return out, states.at[row].set(state), exports

    used = jnp.max(jnp.where(blocks.length > 0, jnp.arange(1, q.shape[0] + 1, dtype=jnp.int32), 0))
    out, states, exports = jax.lax.fori_loop(jnp.int32(0), used, block, (jnp.zeros_like(v), states, exports))
    exports = exports[:trash].reshape(num_rows, num_exports, *initial.shape[1:])
    return out, states[:num_rows], exports
