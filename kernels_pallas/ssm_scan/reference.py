"""`ssm_scan` token by token: the definition, and what deterministic mode runs.

A token has the bits that `ssm_nodes` gives it in its exact form, whatever the number of rows and the length
of the scan. Loops have dynamic bounds, so that padding costs nothing. Not differentiable in reverse.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.recurrence import advance, by_head, key_column, lone_exp, read_out, rounded_product


def ssm_scan(kind, q, k, v, log_decay, beta, initial, blocks):
    """See `api.ssm_scan`."""
    num_rows, num_exports = initial.shape[0], blocks.export.shape[1]
    states = jnp.concatenate([initial, jnp.zeros((1, *initial.shape[1:]), jnp.float32)])
    # Exports that are not asked for are written past the last one.
    trash = num_rows * num_exports
    exports = jnp.zeros((trash + 1, *initial.shape[1:]), jnp.float32)
    product = rounded_product(blocks.length)

    def token(t, carry, block):
        out, state, exports = carry
        now = (None if x is None else x[block, t] for x in (k, v, log_decay, beta))
        state = advance(kind, state, *by_head(kind, v.shape[-2], *now), product=product, exp=lone_exp)
        y = read_out(state, key_column(v.shape[-2], q[block, t]), product=product)[..., 0, :]
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
