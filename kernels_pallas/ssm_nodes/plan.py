"""What `ssm_nodes` is given for each row, and the contract that it trusts."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int32


class NodesPlan(NamedTuple):
    """Slots, lengths and draft trees of the rows of one call.

    A padding row has every field 0 but `parent`, which may hold anything.

    Attributes:
      read_slot: slot of the state before the pending chain; 0 for the zero state.
      write_slot: slot for the state after the pending chain; 0 for nowhere. May be the row's `read_slot`.
      track_slot: slot for the state after `track_len` pending tokens; 0 for none.
      track_len: tokens folded into the tracked state, `1..pending_len`; 0 where `track_slot` is.
      pending_len: pending tokens of the row, `0..D`; what lies behind them is never looked at.
      parent: node whose state each node continues, an earlier one; -1 for the state after the pending
        chain, which any node may have.
      node_len: nodes of the row, `0..T`; what lies behind them is never looked at.
    """

    read_slot: Int32[Array, " row"]
    write_slot: Int32[Array, " row"]
    track_slot: Int32[Array, " row"]
    track_len: Int32[Array, " row"]
    pending_len: Int32[Array, " row"]
    parent: Int32[Array, "row node"]
    node_len: Int32[Array, " row"]


class Inputs(NamedTuple):
    """The inputs of `step` tokens a row, in any float dtype; each is used as float32.

    Attributes:
      q: `[row, step, key_head, state_dim]`, what reads the state (Mamba-2's C). None where a chain's outputs
        are not wanted.
      k: `[row, step, key_head, state_dim]`, what writes it (Mamba-2's B).
      v: `[row, step, head, head_dim]`, the inputs (Mamba-2's x times dt).
      log_decay: `[row, step, head]`, or `[row, step, head, state_dim]` for "kda"; at most 0.
      beta: `[row, step, head]`, the delta rules' step; None for "mamba2".
    """

    q: Float[Array, "row step key_head state_dim"] | None
    k: Float[Array, "row step key_head state_dim"]
    v: Float[Array, "row step head head_dim"]
    log_decay: Float[Array, "row step head *channel"]
    beta: Float[Array, "row step head"] | None


def check_plan(plan: NodesPlan, *, num_slots: int, num_pending: int, depth: int | None = None) -> None:
    """Refuses a plan that breaks the contract of `ssm_nodes`; for debug mode and tests.

    Args:
      plan: on the host; NumPy arrays, or arrays that may be waited for.
      num_slots: slots of the pool, the null slot included.
      num_pending: `D`, the steps of the pending inputs; 0 for None.
      depth: the bound given to `ssm_nodes`, if any.

    Raises:
      ValueError: what is wrong, and in which rows.
    """
    read, write, track, track_len, pending_len, parent, node_len = (np.asarray(x) for x in plan)
    rows, num_nodes = np.arange(len(read)), parent.shape[1]

    for name, slots in (("read_slot", read), ("write_slot", write), ("track_slot", track)):
        _refuse(rows[(slots < 0) | (slots >= num_slots)], f"{name} is not in [0, {num_slots})")
    _refuse(
        rows[(pending_len < 0) | (pending_len > num_pending)], f"pending_len is not in [0, {num_pending}]"
    )
    _refuse(rows[(node_len < 0) | (node_len > num_nodes)], f"node_len is not in [0, {num_nodes}]")
    tracks = track != 0
    _refuse(
        rows[tracks & ((track_len < 1) | (track_len > pending_len))], "track_len is not in [1, pending_len]"
    )

    written, owner = np.concatenate([write, track]), np.concatenate([rows, rows])
    slots, count = np.unique(written[written != 0], return_counts=True)
    twice = np.isin(written, slots[count > 1])
    _refuse(np.unique(owner[twice]), "a slot is written twice (write_slot, track_slot)")
    overwritten = (written[:, None] == read[None, :]) & (written != 0)[:, None]
    overwritten &= owner[:, None] != rows[None, :]
    _refuse(np.unique(owner[overwritten.any(axis=1)]), "write_slot or track_slot is another row's read_slot")

    node = np.arange(num_nodes)
    live = node[None, :] < node_len[:, None]
    wrong = live & ((parent < -1) | (parent >= node[None, :]))
    _refuse(rows[wrong.any(axis=1)], "a parent is neither -1 nor an earlier node")
    if depth is not None:
        path = np.zeros((len(rows), num_nodes + 1), np.int64)
        for n in range(num_nodes):
            path[:, n] = np.where(live[:, n], path[rows, np.where(live[:, n], parent[:, n], -1)] + 1, 0)
        _refuse(rows[(path > depth).any(axis=1)], f"a path has more than depth = {depth} nodes")


def _refuse(rows, why):
    if len(rows):
        raise ValueError(f"ssm_nodes: rows {rows.tolist()}: {why}.")
