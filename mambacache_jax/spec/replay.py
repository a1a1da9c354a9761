"""Accepted tokens that wait to be folded into their request's state, and the fold.

A verify pass leaves the states in the pool as they are. What it accepted is kept as the inputs of the conv
and of the recurrence, a few KB a token and layer, and goes into the state in the pass that reads it next: the
next verify or decode, or `fold` where a state is needed now (finish, publish, preempt with keep, copy, and
before prompt tokens are computed). The slot, its conv window and its stamp stay together: at every moment

    stamp of the working slot + length of the row's pending tokens == kv_len.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.ssm_nodes import Inputs, NodesPlan, ssm_nodes
from mambacache_jax.config import RecurrentSpec
from mambacache_jax.device import Pools, ssm_pool
from mambacache_jax.spec.tree import DraftTree


class PendingReplay(NamedTuple):
    """Inputs of accepted tokens by request-table row, in path order; what folds them returns it anew.

    Attributes:
      inputs: one a recurrent layer, `[row, step, ...]`, without `q`. What lies behind `length` is stale.
      conv: the raw inputs of the same layers' convs, `[row, step, channel]`.
      length: pending tokens of each row; 0 for a row that has just been filled, cleared or folded.
    """

    inputs: tuple[Inputs, ...]
    conv: tuple[Float[Array, "row step channel"], ...]
    length: Int32[Array, " row"]


class ReplayPlan(NamedTuple):
    """Which rows fold what, and where to; a padding row is 0 throughout. Slots as in `NodesPlan`.

    Attributes:
      row: request-table row.
      read_slot: slot of the state, 0 for the zero state.
      write_slot: slot for the state with its pending tokens folded; may be `read_slot`.
      track_slot: slot for the state at the last track point among them; 0: not wanted.
    """

    row: Int32[Array, " row"]
    read_slot: Int32[Array, " row"]
    write_slot: Int32[Array, " row"]
    track_slot: Int32[Array, " row"]


class Replay(NamedTuple):
    """What a pass folds, row by row.

    Attributes:
      length: pending tokens.
      track_slot: as in the plan, and 0 where no track point is reached.
      track_len: of them, folded at the track point: a place on the accepted path.
      kv_len: tokens of the state once they are folded.
    """

    length: Int32[Array, " row"]
    track_slot: Int32[Array, " row"]
    track_len: Int32[Array, " row"]
    kv_len: Int32[Array, " row"]


def make_pending(layers: Sequence[RecurrentSpec], num_rows: int, depth: int, dtype: str) -> PendingReplay:
    """Nothing pending, with room for `depth` tokens a row; `num_rows` includes the null row.

    `dtype` is that of the conv's inputs, the model's own. The recurrence's are float32, as layers make them,
    so that nothing is rounded that decode would not round.
    """

    def of(spec: RecurrentSpec) -> Inputs:
        lead = (num_rows, depth)
        decays = (spec.num_heads, spec.state_dim) if spec.kind == "kda" else (spec.num_heads,)
        return Inputs(
            q=None,
            k=jnp.zeros((*lead, spec.num_key_heads, spec.state_dim), jnp.float32),
            v=jnp.zeros((*lead, spec.num_heads, spec.head_dim), jnp.float32),
            log_decay=jnp.zeros((*lead, *decays), jnp.float32),
            beta=None if spec.kind == "mamba2" else jnp.zeros((*lead, spec.num_heads), jnp.float32),
        )

    return PendingReplay(
        inputs=tuple(of(spec) for spec in layers),
        conv=tuple(jnp.zeros((num_rows, depth, spec.conv_channels), dtype) for spec in layers),
        length=jnp.zeros((num_rows,), jnp.int32),
    )


def shorten(
    pending: PendingReplay, rows: Int32[Array, " entry"], length: Int32[Array, " entry"]
) -> PendingReplay:
    """Keeps the first `length[i]` pending tokens of `rows[i]`, at most those it has.

    0 drops them all: for a row that ends, is preempted without its state, or gets another request. More than
    0 is for a stop that the host alone can see, such as a stop string.
    """
    kept = jnp.minimum(pending.length.at[rows].get(mode="promise_in_bounds"), length)
    return pending._replace(length=pending.length.at[rows].set(kept, mode="promise_in_bounds"))


def begin(
    pools: Pools, pending: PendingReplay, plan: ReplayPlan, track_interval: int
) -> tuple[Pools, Replay]:
    """Lays out a pass over rows with pending tokens, and stamps the slots that it will write.

    Args:
      pools: whose stamps say how many tokens each state has folded.
      pending: what is to be folded.
      plan: the rows.
      track_interval: track points are its multiples; more than a run's tokens, so that a run has one at most.
    """
    live = plan.row != 0
    length, kv_len = _lengths(pools, pending, plan)
    folded = kv_len - length
    track_len = kv_len // track_interval * track_interval - folded
    tracks = (track_len > 0) & (plan.track_slot != 0) & live
    track_len, track_slot = jnp.where(tracks, track_len, 0), jnp.where(tracks, plan.track_slot, 0)
    stamps = pools.ssm.position.at[jnp.concatenate([plan.write_slot, track_slot])].set(
        jnp.concatenate([kv_len, folded + track_len]), mode="promise_in_bounds"
    )
    pools = pools._replace(ssm=pools.ssm._replace(position=stamps))
    return pools, Replay(length, track_slot, track_len, kv_len)


def kv_len_of(pools: Pools, pending: PendingReplay, plan: ReplayPlan) -> Int32[Array, " row"]:
    """Tokens of each row that the target has seen: those of its state, and those pending."""
    return _lengths(pools, pending, plan)[1]


def _lengths(pools: Pools, pending: PendingReplay, plan: ReplayPlan) -> tuple[Array, Array]:
    """Pending tokens of each row, and all that the target has seen."""
    length = jnp.where(plan.row != 0, pending.length.at[plan.row].get(mode="promise_in_bounds"), 0)
    stamp = pools.ssm.position.at[plan.read_slot].get(mode="promise_in_bounds")
    return length, jnp.where(plan.read_slot != 0, stamp, 0) + length


def nodes_plan(plan: ReplayPlan, replay: Replay, tree: DraftTree | None) -> NodesPlan:
    """The same pass as `ssm_nodes` takes it; without a tree it only folds."""
    rows = plan.row.shape[0]
    return NodesPlan(
        read_slot=plan.read_slot,
        write_slot=plan.write_slot,
        track_slot=replay.track_slot,
        track_len=replay.track_len,
        pending_len=replay.length,
        parent=jnp.zeros((rows, 0), jnp.int32) if tree is None else tree.parent,
        node_len=jnp.zeros((rows,), jnp.int32) if tree is None else tree.node_len,
    )


def pending_inputs(pending: PendingReplay, index: int, rows: Int32[Array, " row"]) -> Inputs:
    """The pending inputs of recurrent layer `index` (counted among those) for some rows."""
    of = pending.inputs[index]
    return jax.tree.map(lambda x: x.at[rows].get(mode="promise_in_bounds"), of)


def fold_windows(
    leaf: Float[Array, "slot window channel"],
    pending: Float[Array, "row step channel"],
    plan: ReplayPlan,
    replay: Replay,
) -> tuple[Float[Array, "slot window channel"], Float[Array, "row input channel"]]:
    """Moves the conv windows of rows over their pending inputs `[row, step, channel]`.

    Returns:
      The leaf with the windows in write and track slots, and the inputs that they were cut from: the window
      read, and then the pending ones. A run that is shorter than the window keeps some of what was read.
    """
    history = ssm_pool.read_slots(leaf, plan.read_slot)
    inputs = jnp.concatenate([history, pending], axis=1)
    final, tracked = (windows_at(inputs, at, leaf.shape[1]) for at in (replay.length, replay.track_len))
    slots = jnp.concatenate([plan.write_slot, replay.track_slot])
    return ssm_pool.write_slots(leaf, slots, jnp.concatenate([final, tracked])), inputs


def windows_at(
    inputs: Float[Array, "row input channel"], at: Int32[Array, " row"], size: int
) -> Float[Array, "row window channel"]:
    """The `size` inputs of each row from `at` on."""
    index = at[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    return inputs[jnp.arange(inputs.shape[0], dtype=jnp.int32)[:, None], index]


def fold(
    layers: Sequence[RecurrentSpec],
    pools: Pools,
    pending: PendingReplay,
    plan: ReplayPlan,
    track_interval: int,
) -> tuple[Pools, PendingReplay]:
    """Folds what rows have pending, and nothing else; a row without pending tokens keeps its state.

    Args:
      layers: the recurrent layers' specs.
      pools: donate them, and `pending`, to the program that calls this.
      pending: consumed: the one returned has nothing for these rows.
      plan: the rows.
      track_interval: see `begin`.
    """
    pools, replay = begin(pools, pending, plan, track_interval)
    of_pass = nodes_plan(plan, replay, None)
    states, windows = [], []
    for index, spec in enumerate(layers):
        rows = pending.conv[index].at[plan.row].get(mode="promise_in_bounds")
        windows.append(fold_windows(pools.ssm.conv[index], rows, plan, replay)[0])
        inputs = pending_inputs(pending, index, plan.row)
        states.append(ssm_nodes(spec.kind, pools.ssm.state[index], inputs, None, of_pass)[0])
    pools = pools._replace(ssm=pools.ssm._replace(conv=tuple(windows), state=tuple(states)))
    return pools, shorten(pending, plan.row, jnp.zeros_like(plan.row))
