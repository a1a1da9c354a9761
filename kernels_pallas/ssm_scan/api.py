"""The recurrence of a layer over ragged rows of tokens (`ssm_scan`) or one token a row (`ssm_step`).

A state is float32 `[head, state_dim, head_dim]`: the output sums over `state_dim`. For each token

    S' = diag(exp(log_decay)) S
    u  = v                          "mamba2", where v is already multiplied by dt
    u  = beta * (v - S'^T k)        "gdn" and "kda"
    S  = S' + k (x) u,    o = S^T q

`log_decay` is one number a head for "mamba2" and "gdn", one a head and state channel for "kda", and not
positive. Head `h` uses key head `h // (num_heads // num_key_heads)`.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from kernels_pallas.blocks import Blocks
from kernels_pallas.ssm_scan import reference, xla

Kind = Literal["mamba2", "gdn", "kda"]

_KINDS = ("mamba2", "gdn", "kda")
_IMPLEMENTATIONS: dict[str, Callable] = {"xla": xla.ssm_scan, "reference": reference.ssm_scan}


def ssm_scan(
    kind: str,
    q: Float[Array, "block token key_head state_dim"],
    k: Float[Array, "block token key_head state_dim"],
    v: Float[Array, "block token head head_dim"],
    log_decay: Float[Array, "block token head *channel"],
    beta: Float[Array, "block token head"] | None,
    initial: Float[Array, "row head state_dim head_dim"],
    blocks: Blocks,
    *,
    implementation: str | None = None,
) -> tuple[
    Float32[Array, "block token head head_dim"],
    Float32[Array, "row head state_dim head_dim"],
    Float32[Array, "row export head state_dim head_dim"],
]:
    """Runs every row's tokens through the recurrence, from the row's initial state.

    An export taken after `p` tokens of a block is bit-equal to `final` of the same call with the row
    ending there. Padding tokens may hold anything, NaN too.

    Args:
      kind: "mamba2", "gdn" or "kda".
      q: what reads the state (Mamba-2's C).
      k: what writes it (Mamba-2's B).
      v: the inputs (Mamba-2's x times dt).
      log_decay: `[..., head]`, or `[..., head, state_dim]` for "kda"; at most 0.
      beta: the delta rules' step; None for "mamba2".
      initial: the state before each row's first token.
      blocks: how the rows are cut.
      implementation: "xla" (chunks of one block, in matmuls; the default; differentiable) or "reference"
        (token by token with the body of `ssm_step`, the definition). A named one never falls back.

    Returns:
      The outputs, 0 at padding tokens; the state after each row (`initial` for a row without blocks); and
      the exports, 0 where none was asked for.

    Raises:
      ValueError: an unknown kind or implementation, or shapes that do not fit the kind.
    """
    name = "xla" if implementation is None else implementation
    if name not in _IMPLEMENTATIONS:
        known = ", ".join(_IMPLEMENTATIONS)
        raise ValueError(f"ssm_scan: unknown implementation {name!r}; there are {known}.")
    _check("ssm_scan", kind, k, v, log_decay, beta)
    arrays = _as_float32(q, k, v, log_decay, beta, initial)
    return _IMPLEMENTATIONS[name](kind, *arrays, blocks)


def ssm_step(
    kind: str,
    q: Float[Array, "row key_head state_dim"],
    k: Float[Array, "row key_head state_dim"],
    v: Float[Array, "row head head_dim"],
    log_decay: Float[Array, "row head *channel"],
    beta: Float[Array, "row head"] | None,
    state: Float[Array, "row head state_dim head_dim"],
) -> tuple[Float32[Array, "row head head_dim"], Float32[Array, "row head state_dim head_dim"]]:
    """Advances each row by one token; arguments as in `ssm_scan`.

    Returns:
      The outputs and the states after the token.

    Raises:
      ValueError: an unknown kind, or shapes that do not fit the kind.
    """
    _check("ssm_step", kind, k, v, log_decay, beta)
    return reference.advance(kind, *_as_float32(state, q, k, v, log_decay, beta))


def _as_float32(*arrays):
    return [None if x is None else x.astype(jnp.float32) for x in arrays]


def _check(op, kind, k, v, log_decay, beta):
    if kind not in _KINDS:
        raise ValueError(f"{op}: unknown kind {kind!r}; there are {', '.join(_KINDS)}.")
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
