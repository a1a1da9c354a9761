"""Chooses tokens from logits. A row's choice depends on its logits, its parameters, its seed and position."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def sample(
    logits: Float[Array, "row vocab"], sampling: Int32[Array, "row 5"], positions: Int32[Array, " row"]
) -> Int32[Array, " row"]:
    """One token a row.

    Args:
      logits: float32.
      sampling: the fields that `host.plan.pack_sampling` packs; temperature 0 takes the best token (the
        lowest id among equals).
      positions: position of the token being chosen: with the seed, all that the coin depends on, so neither
        batch nor schedule changes a sampled text.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    temperature = jax.lax.bitcast_convert_type(sampling[:, 0], jnp.float32)

    def drawn() -> Int32[Array, " row"]:
        return jnp.where(temperature > 0, jax.vmap(_draw)(logits, sampling, positions), greedy)

    return jax.lax.cond(jnp.any(temperature > 0), drawn, lambda: greedy)


def _draw(
    logits: Float[Array, " vocab"], sampling: Int32[Array, " 5"], position: Int32[Array, ""]
) -> Int32[Array, ""]:
    """Inverse-CDF sampling over the tokens that top-k, top-p and min-p keep, best first."""
    temperature, top_p, min_p = (jax.lax.bitcast_convert_type(sampling[i], jnp.float32) for i in range(3))
    top_k, seed = sampling[3], jax.lax.bitcast_convert_type(sampling[4], jnp.uint32)
    order = jnp.argsort(-logits, stable=True)
    probs = jax.nn.softmax(logits[order] / jnp.where(temperature > 0, temperature, 1.0))
    rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
    before = jnp.cumsum(probs) - probs
    keep = ((top_k == 0) | (rank < top_k)) & (before < top_p) & (probs >= min_p * probs[0])
    mass = jnp.cumsum(jnp.where(keep | (rank == 0), probs, 0.0))
    coin = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))
    choice = jnp.sum(mass <= coin * mass[-1], dtype=jnp.int32)
    last_kept = jnp.max(jnp.where(keep | (rank == 0), rank, 0))
    return order[jnp.minimum(choice, last_kept)].astype(jnp.int32)
