"""What a model's layers see while a draft tree runs through them, and the commit of what was accepted.

One pass over each recurrent layer's states: pending tokens are folded into them, and the nodes are looked
ahead from there. Nothing of a node gets into a pool before it is accepted: neither state, conv window, nor
K and V, so a rejected draft has never been there.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.causal_conv1d import causal_conv1d_step
from kernels_pallas.ssm_nodes import Inputs, ssm_nodes
from kernels_pallas.ssm_nodes.reference import ssm_nodes_snapshots
from mambacache_jax.config import AttentionSpec, LayerSpec, RecurrentSpec
from mambacache_jax.device import Pools, kv_pool, request_table, ssm_pool
from mambacache_jax.device.tree_attention import path_attention, tree_attention
from mambacache_jax.spec import replay as replay_module
from mambacache_jax.spec.accept import Accepted
from mambacache_jax.spec.replay import PendingReplay, ReplayPlan, fold_windows, nodes_plan, windows_at
from mambacache_jax.spec.tree import DraftTree, hops, live_nodes, node_depth, paths

StateMode = Literal["snapshot", "one_layer", "replay_exact", "replay_parallel"]
"""How the states of nodes are had.

  snapshot         kept for every node of every layer until the verdict, then committed by a gather: what
                   other systems do, and the reference.
  one_layer        kept for every node of the layer that runs, in a buffer that the next layer uses again.
  replay_exact     node by node, with the bits of plain decoding through the same program.
  replay_parallel  never: outputs come from matmuls with ancestor masks, equal to rounding.

All but the first keep the inputs of accepted tokens and fold those into the state in the next pass.
"""


class NodeValues(NamedTuple):
    """What the nodes of a pass leave behind for the commit.

    Attributes:
      kv: K and V of each attention layer, `[row, node, kv_head, ...]`.
      conv: raw conv inputs of each recurrent layer, `[row, node, channel]`.
      inputs: inputs of each recurrence, `[row, node, ...]`, without `q`; empty with snapshots.
      states: with snapshots, the state behind each node, `[row, node, head, ...]`; else empty.
    """

    kv: tuple[tuple[Array, Array], ...]
    conv: tuple[Array, ...]
    inputs: tuple[Inputs, ...]
    states: tuple[Array, ...]


class VerifyContext:
    """One verify pass's view of the pools, for one trace: `pools` and `values` grow as layers run.

    Attributes:
      pools: with pending tokens folded in the layers that have run.
      tokens: the nodes' tokens, flat, row by row; 0 at padding.
      positions: `kv_len` plus depth of each node; never its index.
      kv_len: position of each row's bonus token.
    """

    def __init__(
        self,
        pools: Pools,
        pending: PendingReplay,
        plan: ReplayPlan,
        tree: DraftTree,
        specs: Sequence[LayerSpec],
        *,
        page_size: int,
        depth: int,
        mode: StateMode,
        track_interval: int,
    ) -> None:
        """Stamps the slots that the pass writes, and finds each node's ancestors.

        Args:
          pools: as the last program left them.
          pending: of all request-table rows; consumed: `commit` returns what is pending after this pass.
          plan: the rows that run.
          tree: their drafts.
          specs: the model's layers.
          page_size: KV slots a page.
          depth: most nodes of a path, at most what `pending` has room for.
          mode: how states are had.
          track_interval: see `replay.begin`.
        """
        if depth > pending.conv[0].shape[1]:
            raise ValueError(f"Paths of {depth} nodes do not fit {pending.conv[0].shape[1]} pending tokens.")
        if depth > track_interval:
            raise ValueError(f"A run of {depth} tokens could cross two track points {track_interval} apart.")
        self._pending, self._plan, self._tree, self._specs = pending, plan, tree, specs
        self._page_size, self._depth, self._mode = page_size, depth, mode
        self.pools, self._replay = replay_module.begin(pools, pending, plan, track_interval)
        self.kv_len = self._replay.kv_len
        live = live_nodes(tree)
        self.tokens: Int32[Array, " token"] = jnp.where(live, tree.tokens, 0).reshape(-1)
        self._node_depth = node_depth(tree, depth)
        positions = jnp.where(live, self.kv_len[:, None] + self._node_depth, 0)
        self.positions: Int32[Array, " token"] = positions.reshape(-1)
        self._paths = paths(tree, depth)
        self._kv: list[tuple[Array, Array]] = []
        self._conv: list[Array] = []
        self._inputs: list[Inputs] = []
        self._states: list[Array] = []

    @property
    def values(self) -> NodeValues:
        """What the layers that have run leave for the commit."""
        return NodeValues(tuple(self._kv), tuple(self._conv), tuple(self._inputs), tuple(self._states))

    def _by_row(self, x: Array) -> Array:
        return x.reshape(*self._tree.tokens.shape, *x.shape[1:])

    def conv(
        self,
        layer: int,
        x: Float[Array, "token channel"],
        weight: Float[Array, "channel width"],
        bias: Float[Array, " channel"] | None,
    ) -> Float[Array, "token channel"]:
        """See `Context.conv`: each node's taps are its own ancestors, then what is committed."""
        del layer
        index, past = len(self._conv), weight.shape[1] - 1
        leaf, rows = self.pools.ssm.conv[index], self._plan.row
        pending = self._pending.conv[index].at[rows].get(mode="promise_in_bounds")
        leaf, inputs = fold_windows(leaf, pending, self._plan, self._replay)
        nodes = self._by_row(x)
        inputs = jnp.concatenate([inputs, nodes], axis=1)
        up = hops(self._tree, past)[1:]
        behind = jnp.arange(1, past + 1, dtype=jnp.int32)[:, None, None] - self._node_depth[None]
        committed = past + self._replay.length[None, :, None] - behind
        tap = jnp.where(up >= 0, past + pending.shape[1] + up, committed)
        # Oldest first. A padding node's taps are the oldest input that there is.
        tap = jnp.where(live_nodes(self._tree)[None], tap, 0)[::-1].transpose(1, 2, 0)
        row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None, None]
        window = inputs[row, tap].reshape(x.shape[0], past, x.shape[1])
        out, _ = causal_conv1d_step(x, weight, bias, window)
        ssm = self.pools.ssm
        self.pools = self.pools._replace(ssm=ssm._replace(conv=_replaced(ssm.conv, index, leaf)))
        self._conv.append(nodes)
        return out

    def recur(
        self,
        layer: int,
        q: Float[Array, "token key_head state_dim"],
        k: Float[Array, "token key_head state_dim"],
        v: Float[Array, "token head head_dim"],
        log_decay: Float[Array, "token head *state_dim"],
        beta: Float[Array, "token head"] | None,
    ) -> Float[Array, "token head head_dim"]:
        """See `Context.recur`: the state is read once and written once, whatever the tree."""
        spec, index = self._specs[layer], max(len(self._inputs), len(self._states))
        assert isinstance(spec, RecurrentSpec)
        leaf = self.pools.ssm.state[index]
        nodes = jax.tree.map(self._by_row, Inputs(q, k, v, log_decay, beta))
        pending = replay_module.pending_inputs(self._pending, index, self._plan.row)
        plan = nodes_plan(self._plan, self._replay, self._tree)
        if self._mode == "snapshot":
            leaf = ssm_nodes(spec.kind, leaf, pending, None, nodes_plan(self._plan, self._replay, None))[0]
            out, states = ssm_nodes_snapshots(
                spec.kind, leaf, nodes, plan._replace(read_slot=self._plan.write_slot)
            )
            self._states.append(states)
        else:
            leaf, _, out = ssm_nodes(
                spec.kind,
                leaf,
                pending,
                nodes,
                plan,
                precision="float32" if self._mode == "replay_parallel" else "exact",
                depth=self._depth,
                implementation="reference" if self._mode == "one_layer" else None,
            )
            self._inputs.append(nodes._replace(q=None))
        ssm = self.pools.ssm
        self.pools = self.pools._replace(ssm=ssm._replace(state=_replaced(ssm.state, index, leaf)))
        return out.reshape(-1, *out.shape[2:])

    def attend(
        self,
        layer: int,
        q: Float[Array, "token q_head head_dim"],
        k: Float[Array, "token kv_head head_dim"],
        v: Float[Array, "token kv_head v_head_dim"] | None,
        scale: float,
    ) -> Float[Array, "token q_head v_head_dim"]:
        """See `Context.attend`: each node sees the tokens in the pool and its own path.

        Raises:
          NotImplementedError: the layer keeps its values in its keys (latent attention).
        """
        assert isinstance(self._specs[layer], AttentionSpec)
        if v is None:
            raise NotImplementedError(
                f"Layer {layer} has latent attention: no drafts are verified there yet."
            )
        index = len(self._kv)
        k_pool, v_pool = self.pools.kv.k[index], self.pools.kv.v[index]
        q, k, v = (self._by_row(x) for x in (q, k, v))
        # Rounded before use, as a token is that is read back from the pool.
        k, v = k.astype(k_pool.dtype), v.astype(v_pool.dtype)
        self._kv.append((k, v))
        pages = self.pools.table.pages[self._plan.row]
        if self._mode == "replay_parallel":
            node = jnp.arange(k.shape[1], dtype=jnp.int32)
            ancestors = jnp.any(self._paths[:, :, None, :] == node[None, None, :, None], axis=3)
            out = tree_attention(
                q,
                k_pool,
                v_pool,
                k,
                v,
                pages,
                self.kv_len,
                ancestors,
                scale=scale,
                page_size=self._page_size,
            )
        else:
            out = path_attention(
                q,
                k_pool,
                v_pool,
                k,
                v,
                pages,
                self.kv_len,
                self._paths,
                scale=scale,
                page_size=self._page_size,
            )
        return out.reshape(-1, *out.shape[2:])


def commit(
    pools: Pools,
    pending: PendingReplay,
    values: NodeValues,
    accepted: Accepted,
    plan: ReplayPlan,
    kv_len: Int32[Array, " row"],
    *,
    page_size: int,
    track_interval: int,
) -> tuple[Pools, PendingReplay]:
    """Keeps what was accepted: K and V at their positions, and inputs to be folded, or states from snapshots.

    Args:
      pools: as the pass left them.
      pending: as given to the pass, whose rows have been folded.
      values: of the nodes.
      accepted: runs of at most the pass's depth, already cut at stops.
      plan: as given to the pass.
      kv_len: positions of the bonus tokens.
      page_size: KV slots a page.
      track_interval: see `replay.begin`.

    Returns:
      The pools, where `last_token` is the next bonus token, and what is pending now.
    """
    path, rows = accepted.path, plan.row
    num_rows, depth = path.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    place = jnp.arange(depth, dtype=jnp.int32)[None, :]

    def on_path(x: Array) -> Array:
        return x[row, path]

    slots = request_table.slots_of(
        pools.table, jnp.broadcast_to(rows[:, None], path.shape), kv_len[:, None] + place, page_size
    )
    slots = jnp.where(place < accepted.length[:, None], slots, 0).reshape(-1)

    def write(leaf: Array, x: Array) -> Array:
        return kv_pool.write_rows(leaf, slots, on_path(x).reshape(-1, *x.shape[2:]))

    kv = pools.kv._replace(
        k=tuple(write(leaf, k) for leaf, (k, _) in zip(pools.kv.k, values.kv, strict=True)),
        v=tuple(write(leaf, v) for leaf, (_, v) in zip(pools.kv.v, values.kv, strict=True)),
    )
    last = pools.table.last_token.at[rows].set(accepted.next_token(), mode="promise_in_bounds")
    pools = pools._replace(kv=kv, table=pools.table._replace(last_token=last))
    if values.states:
        ssm = _commit_states(pools.ssm, values, accepted, plan, kv_len, track_interval)
        length = jnp.zeros_like(accepted.length)
        pools, inputs, conv = pools._replace(ssm=ssm), pending.inputs, pending.conv
    else:
        length = accepted.length

        def keep(old: Array, x: Array) -> Array:
            return old.at[rows, :depth].set(on_path(x).astype(old.dtype), mode="promise_in_bounds")

        inputs, conv = jax.tree.map(keep, (pending.inputs, pending.conv), (values.inputs, values.conv))
    length = pending.length.at[rows].set(length, mode="promise_in_bounds")
    return pools, PendingReplay(inputs, conv, length)


def _commit_states(
    ssm: ssm_pool.SSMPool,
    values: NodeValues,
    accepted: Accepted,
    plan: ReplayPlan,
    kv_len: Int32[Array, " row"],
    track_interval: int,
) -> ssm_pool.SSMPool:
    """The states behind the last node of each run and behind its track point, by gather."""
    rows = jnp.arange(kv_len.shape[0], dtype=jnp.int32)
    post = kv_len + accepted.length
    track_len = post // track_interval * track_interval - kv_len
    tracks = (track_len > 0) & (plan.track_slot != 0)
    track_len, track_slot = jnp.where(tracks, track_len, 0), jnp.where(tracks, plan.track_slot, 0)
    write_slot = jnp.where(accepted.length > 0, plan.write_slot, 0)
    slots = jnp.concatenate([write_slot, track_slot])
    tracked = accepted.path[rows, jnp.maximum(track_len - 1, 0)]
    states, windows = [], []
    for leaf, states_of in zip(ssm.state, values.states, strict=True):
        ends = [states_of[rows, node] for node in (accepted.last_node(), tracked)]
        states.append(ssm_pool.write_slots(leaf, slots, jnp.concatenate(ends)))
    for leaf, nodes in zip(ssm.conv, values.conv, strict=True):
        run = nodes[rows[:, None], accepted.path]
        inputs = jnp.concatenate([ssm_pool.read_slots(leaf, write_slot), run], axis=1)
        ends = [windows_at(inputs, at, leaf.shape[1]) for at in (accepted.length, track_len)]
        windows.append(ssm_pool.write_slots(leaf, slots, jnp.concatenate(ends)))
    stamps = ssm.position.at[slots].set(jnp.concatenate([post, kv_len + track_len]), mode="promise_in_bounds")
    return ssm_pool.SSMPool(tuple(windows), tuple(states), stamps)


def _replaced(leaves: tuple[Array, ...], index: int, leaf: Array) -> tuple[Array, ...]:
    return (*leaves[:index], leaf, *leaves[index + 1 :])
