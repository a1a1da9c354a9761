"""One token of the recurrence, on state tiles `[..., state_dim, head_dim]`; what every op's exact form runs.

For each head

    S' = diag(exp(log_decay)) S
    u  = v                          "mamba2", where v is already multiplied by dt
    u  = beta * (v - S'^T k)        "gdn" and "kda"
    S  = S' + k (x) u,    o = S^T q

What is indexed by `state_dim` comes as a column `[..., state_dim, 1]`, what is indexed by `head_dim` as a
row `[..., 1, head_dim]`, and one number a head as `[..., 1, 1]`. Leading axes are free, so a kernel passes
the tile of one head and plain JAX all heads of all rows.

The bits of a token depend on how a compiler joins products and sums. Inside one kernel they are fixed. XLA
joins `a * b + c * d` into one rounding or another from program to program; it cannot with
`rounded_product`, and with sums as an explicit tree every program then has the same bits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

KINDS = ("mamba2", "gdn", "kda")


def advance(
    kind,
    state,
    k,
    v,
    log_decay,
    beta,
    *,
    product: Callable = jnp.multiply,
    exp: Callable = jnp.exp,
    sum_rows=None,
):
    """The state after one token; `log_decay` is a column for "kda", else one number; float32 throughout.

    Args:
      product: multiplies; `rounded_product` where XLA compiles.
      exp: the exponential; `lone_exp` where XLA compiles.
      sum_rows: sums over `state_dim`, keeping the axis; `tree_sum` by default.
    """
    state = product(state, exp(log_decay))
    u = v
    if kind != "mamba2":
        u = beta * (v - (sum_rows or tree_sum)(product(state, k)))
    return state + product(k, u)


def read_out(state, q, *, product: Callable = jnp.multiply, sum_rows=None):
    """The output `S^T q` as a row; arguments as in `advance`."""
    return (sum_rows or tree_sum)(product(state, q))


def tree_sum(x):
    """Sum over the last axis but one, which stays with size 1: halves onto halves."""
    size = x.shape[-2]
    width = 1 << (size - 1).bit_length()
    if width > size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, width - size), (0, 0)])
    while width > 1:
        width //= 2
        x = x[..., :width, :] + x[..., width:, :]
    return x


def rounded_product(length) -> Callable:
    """A float32 product that is rounded on its own, whatever is done with it next.

    Args:
      length: int32 numbers of the call, in `[0, 2^30)`, that no compiler can know. The high bits of their
        maximum are 0; passing a product's bits through an exclusive or with them keeps it apart from a sum.
        (Not the sign bit: of a number that is 0 or -1 LLVM makes a branch, and contracts inside it.)
    """
    zero = jax.lax.shift_right_logical(jnp.max(length), jnp.int32(30))

    def product(x, y):
        bits = jax.lax.bitcast_convert_type(x * y, jnp.int32)
        return jax.lax.bitcast_convert_type(bits ^ zero, jnp.float32)

    return product


def lone_exp(x):
    """An exponential that XLA compiles by itself: inside a larger loop its last bit can be another one."""
    return jax.lax.optimization_barrier(jnp.exp(jax.lax.optimization_barrier(x)))


def by_head(kind, num_heads, k, v, log_decay, beta):
    """`advance`'s float32 columns and rows for every head, from arrays `[..., head, channel]`.

    Args:
      num_heads: heads; head `h` uses key head `h // (num_heads // key_heads)`.
      k: `[..., key_head, state_dim]`.
      v: `[..., head, head_dim]`.
      log_decay: `[..., head]`, or `[..., head, state_dim]` for "kda".
      beta: `[..., head]`, or None for "mamba2".
    """
    v, log_decay = v.astype(jnp.float32)[..., None, :], log_decay.astype(jnp.float32)
    log_decay = log_decay[..., None] if kind == "kda" else log_decay[..., None, None]
    beta = None if beta is None else beta.astype(jnp.float32)[..., None, None]
    return key_column(num_heads, k), v, log_decay, beta


def key_column(num_heads, x):
    """`[..., key_head, state_dim]` as a float32 column of every head."""
    return jnp.repeat(x.astype(jnp.float32), num_heads // x.shape[-2], axis=-2)[..., None]


def check_heads(op, kind, k, v, log_decay, beta):
    """Refuses a kind or shapes that do not fit: axes as in `by_head`.

    Raises:
      ValueError: names the op, the shapes and what was expected.
    """
    if kind not in KINDS:
        raise ValueError(f"{op}: unknown kind {kind!r}; there are {', '.join(KINDS)}.")
    if v.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{op}: heads must be a multiple of key heads, got {v.shape[-2]} and {k.shape[-2]} key heads."
        )
    want = (*v.shape[:-1], k.shape[-1]) if kind == "kda" else v.shape[:-1]
    if log_decay.shape != want:
        raise ValueError(f"{op}: {kind!r} takes log_decay of shape {want}, got {log_decay.shape}.")
    if kind == "mamba2" and beta is not None:
        raise ValueError(f"{op}: 'mamba2' takes no beta; multiply v by dt instead.")
    if kind != "mamba2" and beta is None:
        raise ValueError(f"{op}: {kind!r} needs beta of shape {v.shape[:-1]}.")
    if beta is not None and beta.shape != v.shape[:-1]:
        raise ValueError(f"{op}: {kind!r} needs beta of shape {v.shape[:-1]}, got {beta.shape}.")
