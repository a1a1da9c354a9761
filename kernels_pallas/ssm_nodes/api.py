"""One pass over the recurrent states of rows: fold a chain of pending tokens, then look ahead along a tree.

The state is what is large, so it is read once and written once, whatever is asked:

  decode    one pending token, no nodes: its output is the layer's.
  replay    pending tokens alone: accepted drafts are folded into the state.
  verify    nodes alone, nothing pending, `write_slot` 0: the outputs of all nodes of a draft tree.
  both      what the last round accepted is folded in the pass that verifies the next one's tree.
  copy      nothing pending, `write_slot` apart from `read_slot`.

For each row, phase 1 folds the pending chain token by token, phase 2 computes the nodes' outputs and stores
no state. With the state `S` of the token before, or of the node's parent, every token and node computes

    S' = diag(exp(log_decay)) S
    u  = v                          "mamba2", where v is already multiplied by dt
    u  = beta * (v - S'^T k)        "gdn" and "kda"
    S  = S' + k (x) u,    o = S^T q

and head `h` uses key head `h // (num_heads // num_key_heads)`. Sources: Mamba-2, arXiv 2405.21060; gated
DeltaNet, arXiv 2412.06464; KDA, arXiv 2510.26692. The tree form of phase 2 is derived in `tiles`.

Slot contract, which `check_plan` checks on the host and nothing checks on the device: every slot is in
`[0, num_slots)`; write and track slots are distinct apart from the null slot; none is the read slot of
another row. Reading slot 0 gives the zero state whatever it holds; what is written to it is garbage that
nobody reads. A padding row touches slot 0 alone.
"""

import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from kernels_pallas.dispatch import Op
from kernels_pallas.recurrence import check_heads
from kernels_pallas.ssm_nodes import gpu, reference, tpu, xla
from kernels_pallas.ssm_nodes.packed import count_heads
from kernels_pallas.ssm_nodes.plan import Inputs as Inputs
from kernels_pallas.ssm_nodes.plan import NodesPlan as NodesPlan

Precision = Literal["exact", "float32", "fast"]

_PRECISIONS = ("exact", "float32", "fast")

OP = Op(
    "ssm_nodes",
    {
        "xla": xla.ssm_nodes,
        "triton": gpu.ssm_nodes,
        "tpu": tpu.ssm_nodes,
        "reference": reference.ssm_nodes,
    },
    order={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("tpu", "xla")},
)


def ssm_nodes(
    kind: str,
    pool: Float[Array, "slot pack state_dim lane"],
    pending: Inputs | None,
    nodes: Inputs | None,
    plan: NodesPlan,
    *,
    precision: str = "float32",
    depth: int | None = None,
    min_log_decay: float | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "slot pack state_dim lane"],
    Float32[Array, "row pending head head_dim"] | None,
    Float32[Array, "row node head head_dim"],
]:
    """Folds each row's pending tokens into its state, and computes the outputs of its nodes.

    After each pending token the state is rounded to the pool's dtype (an output comes from the state before
    that rounding), so that folding tokens at once, in parts or one by one, and decoding them, gives the same
    bits of states and outputs: in one implementation, and in "xla" and "reference" alike on one platform.

    Args:
      kind: "mamba2", "gdn" or "kda".
      pool: float32 or bfloat16 states by slot, or `[slot, head // g, state_dim, g * head_dim]` with `g` heads
        side by side, as TPUs want heads of less than 128. Donate it to the program that calls this; the
        pool returned is then in the same buffer.
      pending: `D` tokens a row; None for `D = 0`. Without `q` the chain's outputs are not computed.
      nodes: `T` nodes a row; None for `T = 0`.
      plan: slots, lengths and parents; arrays on the device are trusted, see the slot contract above.
      precision: of the nodes' outputs. "exact": node by node in elementwise float32, the bits that decoding
        each path would give. "float32": in matmuls with ancestor masks, products in full float32; equal to
        rounding (a few 1e-7; with a bfloat16 pool, node states are not rounded between nodes). "fast": the
        same with the platform's default products, bfloat16 or TF32 on most (1e-3 to 1e-2).
      depth: a bound on the nodes of any path from a node whose parent is -1; by default `T`. Smaller bounds
        save products of the delta rules.
      min_log_decay: for "kda", a bound below `log_decay` that the model guarantees. With
        `depth * -min_log_decay <= 80` the masked forms then factor the decays, which is cheaper than the
        pairwise form; outputs are undefined where it does not hold.
      implementation: "xla" (any platform), "triton" (NVIDIA GPUs), "tpu" (both interpreted on a CPU), or
        "reference" (the definition, every state kept); by default the platform's order. A named one never
        falls back.

    Returns:
      The pool; the outputs of the pending tokens, 0 behind `pending_len`, or None without `pending.q`; the
      outputs of the nodes, 0 behind `node_len`. Slots that the plan does not write keep every bit.

    Raises:
      ValueError: an unknown kind, precision or implementation, or shapes that do not fit one another.
      NotImplementedError: the implementation named cannot do this call; the message says why.
    """
    _check(kind, pool, pending, nodes, plan, precision, depth, min_log_decay)
    num_rows, num_nodes = plan.parent.shape
    if not num_rows:
        empty = functools.partial(_no_outputs, pool, count_heads(pool, pending, nodes))
        pending_out = None if pending is not None and pending.q is None else empty(pending)
        return pool, pending_out, empty(nodes)
    return OP(
        implementation,
        kind,
        pool,
        pending,
        nodes,
        plan,
        precision=precision,
        depth=depth or num_nodes,
        min_log_decay=min_log_decay,
    )


def _no_outputs(pool, num_heads, inputs):
    _, packs, _, lanes = pool.shape
    steps = 0 if inputs is None else inputs.v.shape[1]
    return jnp.zeros((0, steps, num_heads, packs * lanes // num_heads), jnp.float32)


def _check(kind, pool, pending, nodes, plan, precision, depth, min_log_decay):
    if precision not in _PRECISIONS:
        known = ", ".join(_PRECISIONS)
        raise ValueError(f"ssm_nodes: unknown precision {precision!r}; there are {known}.")
    if pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"ssm_nodes: the pool must be float32 or bfloat16, got {pool.dtype}.")
    if depth is not None and depth < 1:
        raise ValueError(f"ssm_nodes: depth counts nodes of a path and is at least 1, got {depth}.")
    if min_log_decay is not None and min_log_decay > 0:
        raise ValueError(f"ssm_nodes: min_log_decay bounds numbers that are at most 0, got {min_log_decay}.")
    num_rows, num_nodes = plan.parent.shape
    steps = 0 if nodes is None else nodes.v.shape[1]
    if steps != num_nodes:
        raise ValueError(f"ssm_nodes: plan.parent has {num_nodes} nodes a row, the node inputs {steps}.")
    for name, field in zip(plan._fields, plan, strict=True):
        if field.shape[:1] != (num_rows,):
            raise ValueError(f"ssm_nodes: plan.{name} must have {num_rows} rows, got shape {field.shape}.")
    _, packs, state_dim, lanes = pool.shape
    num_heads = count_heads(pool, pending, nodes)
    if num_heads % packs or lanes % (num_heads // packs):
        num_heads = packs
    head_dim = lanes * packs // num_heads
    for name, inputs in (("pending", pending), ("nodes", nodes)):
        if inputs is None:
            continue
        q, k, v, log_decay, beta = inputs
        op = f"ssm_nodes: {name}"
        check_heads(op, kind, k, v, log_decay, beta)
        if v.shape[0] != num_rows or v.shape[2:] != (num_heads, head_dim):
            want = (num_rows, v.shape[1], num_heads, head_dim)
            raise ValueError(f"{op}: v must have shape {want} for this plan and pool, got {v.shape}.")
        if k.shape[:2] != v.shape[:2] or k.shape[3] != state_dim:
            want = (*v.shape[:2], k.shape[2], state_dim)
            raise ValueError(f"{op}: k must have shape {want} for this plan and pool, got {k.shape}.")
        if q is None and name == "nodes":
            raise ValueError(f"{op}: q is None, but outputs are all that nodes are for.")
        if q is not None and q.shape != k.shape:
            raise ValueError(f"{op}: q must have k's shape {k.shape}, got {q.shape}.")
