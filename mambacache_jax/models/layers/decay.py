"""First values for what decides how fast a recurrent state forgets."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32


def initial_a_log(num_heads: int, rngs: nnx.Rngs) -> Float32[Array, " head"]:
    """`log(A)` of each head, with A uniform in [1, 8)."""
    return jnp.log(jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, 1.0, 8.0))


def initial_dt_bias(
    size: int, rngs: nnx.Rngs, *, low: float = 1e-3, high: float = 0.1
) -> Float32[Array, " size"]:
    """The biases whose softplus is log-uniform in `[low, high)`."""
    log_dt = jax.random.uniform(rngs.params(), (size,), jnp.float32, math.log(low), math.log(high))
    return jnp.log(jnp.expm1(jnp.exp(log_dt)))
