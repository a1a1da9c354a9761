"""`slot_copy` move by move: the definition."""

import jax
import jax.numpy as jnp


def slot_copy(pools, src, dst):
    """See `api.slot_copy`."""

    def move(pools, slots):
        src, dst = slots
        pools = jax.tree.map(
            lambda leaf: leaf.at[dst].set(jnp.where(src != 0, leaf[src], jnp.zeros((), leaf.dtype))), pools
        )
        return pools, None

    return jax.lax.scan(move, pools, (src, dst))[0]
