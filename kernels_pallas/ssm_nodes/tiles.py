"""Outputs of a draft tree from one head's state, in matmuls: no state of any node exists.

With `M[i, j] = 1` where `j` is `i` or one of its ancestors, unrolling the recurrence from node `i` up to the
state `S` gives, as in a causal chunk with `M` in the place of the causal mask,

    D[i, j] = sum of log_decay over the path behind j through i      G[i] = sum over i's whole path
    (I + A) U = beta (V - exp(G) K S)      A = beta (M - I) exp(D) K K^T      "mamba2": U = V
    O = exp(G) Q S + (M exp(D) Q K^T) U

(for KDA `exp(D)` weighs each channel inside the products). `D` is `M diag(log_decay) (M - I)`: a sum of
non-positive terms and never a difference of sums, so nothing overflows and a slow decay behind a fast one
keeps its digits.

Everything here is 2-D, of one row and head: `lax.dot_general`, elementwise functions, sums and masks from
iotas, which is what Mosaic and Triton both lower; plain JAX maps over rows and heads with `vmap`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Factored decays stay within exp(+-40) of their reference: far inside float32, and their products too.
SPLIT_RANGE = 80.0


def products(precision: str) -> tuple[Callable, Callable]:
    """`(dot, sum_dot)` of `node_outputs` for "float32" and "fast"."""
    exact = make_dot(jax.lax.Precision.HIGHEST)
    return (exact if precision == "float32" else make_dot(jax.lax.Precision.DEFAULT)), exact


def make_dot(precision) -> Callable:
    """`dot(x, y, transposed=False)`: `x @ y`, or `x @ y.T`, with float32 sums."""

    def dot(x, y, transposed=False):
        contract = (((1,), (1 if transposed else 0,)), ((), ()))
        return jax.lax.dot_general(x, y, contract, precision=precision, preferred_element_type=jnp.float32)

    return dot


def rounded_dot(mantissa_bits: int) -> Callable:
    """A `dot` whose operands are rounded as matrix units round float32: to 7 bits (bfloat16) or 10 (TF32).

    For tests on a CPU, where "fast" is as precise as "float32".
    """
    exact = make_dot(jax.lax.Precision.HIGHEST)

    def dot(x, y, transposed=False):
        return exact(*(jax.lax.reduce_precision(z, 8, mantissa_bits) for z in (x, y)), transposed)

    return dot


def node_outputs(
    kind,
    state,
    q,
    k,
    v,
    log_decay,
    beta,
    ancestors,
    *,
    depth,
    min_log_decay=None,
    dot,
    sum_dot,
    dot_both=None,
):
    """Outputs `[T, head_dim]` of the nodes of one row and head, float32 throughout.

    Args:
      kind: "mamba2", "gdn" or "kda".
      state: `[state_dim, head_dim]`, what nodes without a parent continue.
      q, k: `[T, state_dim]`.
      v: `[T, head_dim]`.
      log_decay: `[T, 1]`, or `[T, state_dim]` for "kda".
      beta: `[T, 1]`, or None for "mamba2".
      ancestors: `M`, `[T, T]`, float32 zeros and ones; zero rows and columns for padding nodes, whose other
        inputs must be finite.
      depth: a bound on the nodes of a path.
      min_log_decay: a bound below `log_decay`, or None.
      dot: products, as `make_dot` makes them.
      sum_dot: sums of decays, a product with zeros and ones; must have float32's precision.
      dot_both: `(dot(x, z), dot(y, z))` of `(x, y, z, transposed)`, where one product of both is cheaper.
    """
    # exp(-200) is 0 in float32, as exp(-inf) is, and stays finite when it is multiplied by 0.
    log_decay = jnp.maximum(log_decay, -200.0)
    if dot_both is None or kind == "mamba2":
        dot_both = functools.partial(_dot_each, dot)
    strict = jnp.where(_equal(ancestors.shape), 0.0, ancestors)
    from_start = sum_dot(ancestors, log_decay)
    if kind != "kda":
        qk, kk = _scalar_scores(q, k, log_decay, ancestors, strict, dot_both, sum_dot)
    elif min_log_decay is not None and splits(min_log_decay, depth):
        qk, kk = _split_scores(q, k, from_start, 0.5 * min_log_decay * depth, dot_both)
    else:
        qk, kk = _pairwise_scores(q, k, log_decay, ancestors, strict, sum_dot)
    qk, kk = jnp.where(ancestors > 0, qk, 0.0), jnp.where(strict > 0, kk, 0.0)
    from_start = jnp.exp(from_start)
    of_q, of_k = dot_both(q * from_start, k * from_start, state)
    u = v
    if kind != "mamba2":
        u = dot(unit_inverse(beta * kk, ancestors, depth, dot), beta * (v - of_k))
    return of_q + dot(qk, u)


def splits(min_log_decay, depth) -> bool:
    """Whether decays with this bound may be factored along paths of `depth` nodes."""
    return -min_log_decay * depth <= SPLIT_RANGE


def _dot_each(dot, x, y, z, transposed=False):
    return dot(x, z, transposed), dot(y, z, transposed)


def _scalar_scores(q, k, log_decay, ancestors, strict, dot_both, sum_dot):
    decay = jnp.exp(sum_dot(ancestors, log_decay * strict))
    qk, kk = dot_both(q, k, k, transposed=True)
    return decay * qk, decay * kk


def _split_scores(q, k, from_start, middle, dot_both):
    """`exp(D[i, j])` as `exp(G[i] - middle) exp(middle - G[j])`, which holds where `j` is on `i`'s path."""
    after, before = jnp.exp(from_start - middle), k * jnp.exp(middle - from_start)
    return dot_both(q * after, k * after, before, transposed=True)


def _pairwise_scores(q, k, log_decay, ancestors, strict, sum_dot):
    """One node `j` after the other: its decays to all nodes, then column `j` of both products."""
    num_nodes = q.shape[0]
    column = jax.lax.broadcasted_iota(jnp.int32, ancestors.shape, 1)
    row = jax.lax.broadcasted_iota(jnp.int32, k.shape, 0)

    def of_node(j, scores):
        qk, kk = scores
        behind = jnp.sum(jnp.where(column == j, strict, 0.0), axis=1, keepdims=True)
        key = jnp.sum(jnp.where(row == j, k, 0.0), axis=0, keepdims=True)
        key = key * jnp.exp(sum_dot(ancestors, behind * log_decay))
        of_q, of_k = (jnp.sum(x * key, axis=1, keepdims=True) for x in (q, k))
        return jnp.where(column == j, of_q, qk), jnp.where(column == j, of_k, kk)

    zeros = jnp.zeros(ancestors.shape, jnp.float32)
    return jax.lax.fori_loop(0, num_nodes, of_node, (zeros, zeros))


def unit_inverse(a, ancestors, depth, dot):
    """`(I + a)^-1` of an `a` that is nonzero only from nodes to their strict ancestors.

    Nodes are split by depth into halves, again and again, and inverses joined: with `P` and `R` those of the
    two halves of each run of depths, `[[P, 0], [-R a P, R]]`. That is `2 ceil(log2(depth)) - 1` products,
    and as accurate as substitution. The series `(I - a)(I + a^2)(I + a^4)...` takes as many and is not: a
    key that is written again and again makes the powers of `a` binomials.
    """
    same = _equal(a.shape)
    ones = jnp.ones(a.shape, jnp.float32)
    # Each sum counts at most T nodes, which every product holds exactly.
    path_len = jnp.sum(ancestors, axis=1, keepdims=True).astype(jnp.int32)
    path_len_of_column = dot(ones, ancestors, transposed=True).astype(jnp.int32)
    apart = (path_len - 1) ^ (path_len_of_column - 1)
    inverse = jnp.where(same, 1.0, jnp.where(apart == 1, -a, 0.0))
    half = 2
    while half < depth:
        between = jnp.where((apart >= half) & (apart < 2 * half), a, 0.0)
        inverse = inverse - dot(inverse, dot(between, inverse))
        half *= 2
    return inverse


def _equal(shape):
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(jnp.int32, shape, 1)
