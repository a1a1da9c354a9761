"""The optimiser of `train`: Muon for matrices, Adam for the rest."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mambacache_jax.models import weights

# A quintic that drives singular values of (0, 1] towards 1 in five rounds (Keller Jordan's Muon).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def optimiser(params: Any) -> Any:
    """An optax transformation; the caller multiplies its updates by the learning rate and subtracts them.

    The matrices between layers get Muon, all else Adam, and both move by about the same root mean square,
    so they share a learning rate. Decay is decoupled, on what has two axes.
    """
    import optax

    kinds = ["matrix" if _is_inner_matrix(name) else "other" for name in weights.names(params)]
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {
                "matrix": optax.chain(
                    optax.trace(decay=0.95, nesterov=True),
                    optax.stateless(lambda updates, _: jax.tree.map(orthogonalised, updates)),
                ),
                "other": optax.scale_by_adam(b1=0.9, b2=0.95),
            },
            jax.tree.unflatten(jax.tree.structure(params), kinds),
        ),
        optax.add_decayed_weights(0.1, mask=jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    )


def orthogonalised(update: Float[Array, "in out"]) -> Float[Array, "in out"]:
    """The nearest matrix with equal singular values, roughly, of root mean square 0.2 (as Adam's are)."""
    wide = update.shape[0] <= update.shape[1]
    x = update if wide else update.T
    x = x / (jnp.linalg.norm(x) + 1e-7)
    a, b, c = _QUINTIC

    def closer(_: Any, x: Array) -> Array:
        gram = x @ x.T
        return a * x + (b * gram + c * (gram @ gram)) @ x

    x = jax.lax.fori_loop(0, _ROUNDS, closer, x)
    return (x if wide else x.T) * (0.2 * max(update.shape) ** 0.5)


def _is_inner_matrix(name: str) -> bool:
    return (
        name.endswith(".weight")
        and not name.startswith(("embedding", "head"))
        and not ("norm" in name or ".conv." in name)
    )
