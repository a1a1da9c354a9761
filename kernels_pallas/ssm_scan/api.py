"""The recurrence of a layer over ragged rows of tokens, such as a prompt in chunks.

A state is float32 `[head, state_dim, head_dim]`: the output sums over `state_dim`. For each token

    S' = diag(exp(log_decay)) S
    u  = v                          "mamba2", where v is already multiplied by dt
    u  = beta * (v - S'^T k)        "gdn" and "kda"
    S  = S' + k (x) u,    o = S^T q

`log_decay` is one number a head for "mamba2" and "gdn", one a head and state channel for "kda", and not
positive. Head `h` uses key head `h // (num_heads // num_key_heads)`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from kernels_pallas.blocks import Blocks
from kernels_pallas.dispatch import Op
from kernels_pallas.recurrence import check_heads
from kernels_pallas.ssm_scan import reference, xla

OP = Op(
    "ssm_scan",
    {"xla": xla.ssm_scan, "reference": reference.ssm_scan},
    order={"cpu": ("xla",), "gpu": ("xla",), "tpu": ("xla",)},
)


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
        (token by token with the bits of `ssm_nodes`' exact form, the definition). A named one never falls
        back.

    Returns:
      The outputs, 0 at padding tokens; the state after each row (`initial` for a row without blocks); and
      the exports, 0 where none was asked for.

    Raises:
      ValueError: an unknown kind or implementation, or shapes that do not fit the kind.
    """
    check_heads("ssm_scan", kind, k, v, log_decay, beta)
    arrays = (q, k, v, log_decay, beta, initial)
    arrays = (None if x is None else x.astype(jnp.float32) for x in arrays)
    return OP(implementation, kind, *arrays, blocks)
