"""A model's part of a round of speculation: a draft tree through all layers, the verdict, and the commit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mambacache_jax.device import Pools
from mambacache_jax.models.model import Model
from mambacache_jax.spec.accept import Accepted
from mambacache_jax.spec.context import StateMode, VerifyContext, commit
from mambacache_jax.spec.replay import PendingReplay, ReplayPlan
from mambacache_jax.spec.tree import DraftTree

Judge = Callable[[DraftTree, Array, Array], Accepted]
"""`(tree, logits [row, node, vocab], kv_len [row])` to the runs that are kept, cut at stops."""


class Round(NamedTuple):
    """What a round leaves on the device besides the pools.

    Attributes:
      accepted: the runs, keyed by plan row.
      hidden: hidden vector of each run's last node, from which a draft model goes on.
      kv_len: tokens of each row in the pools after the round.
    """

    accepted: Accepted
    hidden: Float[Array, "row size"]
    kv_len: Int32[Array, " row"]


def verify(
    model: Model,
    params: Any,
    pools: Pools,
    pending: PendingReplay,
    plan: ReplayPlan,
    tree: DraftTree,
    judge: Judge,
    *,
    page_size: int,
    depth: int,
    mode: StateMode,
    track_interval: int,
) -> tuple[Pools, PendingReplay, Round]:
    """Runs draft trees through the model once and keeps what `judge` accepts.

    Plain decoding is the same pass with one node a row. What each row has pending is folded on the way.

    Args:
      model: the target.
      params: its parameters.
      pools: donate them, and `pending`, to the program that calls this.
      pending: consumed.
      plan: rows and slots; each row's table covers the positions of the longest run.
      tree: node 0 of each row is the token that the row sampled last.
      judge: the acceptance rule.
      page_size: KV slots a page.
      depth: most nodes of a path.
      mode: how states of nodes are had.
      track_interval: a state is exported at its multiples, to the plan's track slots.

    Returns:
      Pools, what is pending now, and the runs.
    """
    ctx = VerifyContext(
        pools,
        pending,
        plan,
        tree,
        model.specs,
        page_size=page_size,
        depth=depth,
        mode=mode,
        track_interval=track_interval,
    )
    hidden = model.hidden(params, ctx.tokens, ctx)
    rows, nodes = tree.tokens.shape
    logits = model.logits(params, hidden).reshape(rows, nodes, -1)
    accepted = judge(tree, logits, ctx.kv_len)
    pools, pending = commit(
        ctx.pools,
        pending,
        ctx.values,
        accepted,
        plan,
        ctx.kv_len,
        page_size=page_size,
        track_interval=track_interval,
    )
    last = hidden.reshape(rows, nodes, -1)[jnp.arange(rows, dtype=jnp.int32), accepted.last_node()]
    return pools, pending, Round(accepted, last, ctx.kv_len + accepted.length)
