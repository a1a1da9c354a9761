"""A model's part of a planned round of speculation: what the rows carry over, drafts, and the verdict."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mambacache_jax.config import RecurrentSpec
from mambacache_jax.device import Pools, request_table
from mambacache_jax.models.model import Model
from mambacache_jax.models.plain import PlainContext
from mambacache_jax.models.verify import verify
from mambacache_jax.spec.accept import Accepted, Sample, choose, cut, walk
from mambacache_jax.spec.context import StateMode
from mambacache_jax.spec.draft import DeviceDraft
from mambacache_jax.spec.replay import PendingReplay, ReplayPlan, kv_len_of, make_pending, shorten
from mambacache_jax.spec.tree import DraftTree

Fields = Mapping[str, Int32[Array, "..."]]


class Carried(NamedTuple):
    """What rounds hand on, by request-table row. Every round takes it donated and returns it.

    Attributes:
      pending: accepted tokens that wait to be folded.
      hidden: the target's hidden vector of the last token that it has seen in a round.
    """

    pending: PendingReplay
    hidden: Float[Array, "row size"]


def make_carried(model: Model, num_rows: int, depth: int) -> Carried:
    """Nothing pending; `num_rows` includes the null row, `depth` is the most tokens of a round."""
    hidden = jax.eval_shape(
        lambda params: model.hidden(params, jnp.zeros((1,), jnp.int32), PlainContext(model.specs, 1, 1)),
        model.params,
    )
    recurrent = [spec for spec in model.specs if isinstance(spec, RecurrentSpec)]
    return Carried(
        make_pending(recurrent, num_rows, depth, model.dtype),
        jnp.zeros((num_rows, hidden.shape[1]), hidden.dtype),
    )


def advance_round(
    model: Model,
    params: Any,
    pools: Pools,
    carried: Carried,
    plan: Fields,
    *,
    sample: Sample,
    draft: DeviceDraft | None,
    page_size: int,
    depth: int,
    mode: StateMode,
    track_interval: int,
) -> tuple[Pools, Carried, Accepted]:
    """Runs a round whose drafts come with the plan, or from `draft` for the rows that may have some.

    Args:
      model: the target.
      params: its parameters.
      pools: as the last program left them.
      carried: as the last round left it.
      plan: the fields of `layout.RoundShape`.
      sample: the engine's sampler.
      draft: proposes inside the program, or None.
      page_size: KV slots a page.
      depth: most tokens of a round.
      mode: how states of nodes are had.
      track_interval: states are exported at its multiples, where the plan gives a slot.
    """
    table = request_table.set_blocks(
        pools.table, plan["update_row"], plan["update_block"], plan["update_pages"]
    )
    pools = pools._replace(table=table)
    # What a row's last request left pending is dropped; the other rows drop what the null row has.
    fresh = jnp.where(plan["fresh"] != 0, plan["row"], 0)
    pending = shorten(carried.pending, fresh, jnp.zeros_like(fresh))
    rows = ReplayPlan(plan["row"], plan["read"], plan["write"], plan["track"])
    bonus = pools.table.last_token[rows.row]
    tree = DraftTree(plan["token"].at[:, 0].set(bonus), plan["parent"], plan["node_len"])
    if draft is not None:
        kv_len = kv_len_of(pools, pending, rows)
        drafted = draft.propose(params, pools, rows.row, bonus, carried.hidden[rows.row], kv_len)
        node_len = jnp.where(plan["drafts"] != 0, drafted.node_len, plan["node_len"])
        tree = drafted._replace(node_len=node_len)

    def judge(tree: DraftTree, logits: Array, kv_len: Array) -> Accepted:
        chosen = choose(sample, logits, plan["sampling"], tree, kv_len, depth)
        no_stops = jnp.full((tree.node_len.shape[0], 1), -1, jnp.int32)
        return cut(walk(tree, chosen, depth), no_stops, plan["limit"])

    pools, pending, out = verify(
        model,
        params,
        pools,
        pending,
        rows,
        tree,
        judge,
        page_size=page_size,
        depth=depth,
        mode=mode,
        track_interval=track_interval,
    )
    hidden = carried.hidden.at[rows.row].set(out.hidden, mode="promise_in_bounds")
    return pools, Carried(pending, hidden), out.accepted
