"""Drafts from a multi-token-prediction head over the target's frozen K and V.

The head shares embedding and output map with the target, reads K and V of one of its attention layers, and
writes none: through all its steps queries stay at the position of the last committed token, and what carries
the draft forward is the hidden vector alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mambacache_jax.device import Pools
from mambacache_jax.device.attention import paged_attention
from mambacache_jax.spec.tree import DraftTree

Step = Callable[[Any, Array, Array, Array, Callable[[Array, float], Array]], Array]
"""`(params, tokens [n], hidden [n, size], positions [n], attend) -> hidden [n, size]`: `Model.mtp_step`."""

Head = Callable[[Any, Array], Array]
"""`(params, hidden [n, size]) -> float32 logits [n, vocab]`, as `Model.logits`."""


@dataclasses.dataclass(frozen=True)
class MTPDraft:
    """EAGLE-2's way to draft, with a frozen head: `topk` branches a step, the best nodes kept at the end.

    Attributes:
      step: one step of the head.
      head: the target's output map.
      layer: which attention layer's K and V the head reads, counted among attention layers.
      page_size: KV slots a page.
      steps: tokens ahead, at least 1.
      topk: branches; 1 drafts a chain.
      num_nodes: nodes of the verify tree, the bonus token included.
    """

    step: Step
    head: Head
    layer: int
    page_size: int
    steps: int
    topk: int
    num_nodes: int

    def __post_init__(self) -> None:
        most = pool_size(self.topk, self.steps) + 1
        if self.steps < 1 or self.topk < 1 or not 2 <= self.num_nodes <= most:
            raise ValueError(
                f"MTPDraft: steps={self.steps} and topk={self.topk} draft {most - 1} candidates, so that "
                f"num_nodes must be in [2, {most}], got {self.num_nodes}."
            )

    @property
    def depth(self) -> int:
        """Most nodes of a path, the bonus token included."""
        return self.steps + 1

    def propose(
        self,
        params: Any,
        pools: Pools,
        row: Int32[Array, " row"],
        bonus: Int32[Array, " row"],
        hidden: Float[Array, "row size"],
        kv_len: Int32[Array, " row"],
    ) -> DraftTree:
        """See `DeviceDraft.propose`; a row whose `kv_len` is 0 gets no drafts."""
        rows = bonus.shape[0]
        live = (row != 0) & (kv_len > 0)
        tokens, parent, rank = self._candidates(params, pools, row, bonus, hidden, kv_len)
        # Ranks fall along paths, and among equals the earlier candidate comes first: parents are kept.
        order = jnp.argsort(-rank, axis=1, stable=True)[:, : self.num_nodes - 1]
        kept = jnp.sort(order, axis=1)
        at = jnp.arange(rows, dtype=jnp.int32)[:, None]
        # Kept before a candidate, the bonus token with them: the candidate's index in the verify tree.
        candidate = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :, None]
        index = 1 + jnp.sum(kept[:, None, :] < candidate, axis=2, dtype=jnp.int32)
        before = parent[at, kept]
        of_kept = jnp.where(before < 0, 0, index[at, jnp.maximum(before, 0)])
        return DraftTree(
            tokens=jnp.concatenate([bonus[:, None], tokens[at, kept]], axis=1),
            parent=jnp.concatenate([jnp.full((rows, 1), -1, jnp.int32), of_kept], axis=1),
            node_len=jnp.where(live, self.num_nodes, (row != 0).astype(jnp.int32)),
        )

    def _candidates(
        self, params: Any, pools: Pools, row: Array, bonus: Array, hidden: Array, kv_len: Array
    ) -> tuple[Array, Array, Array]:
        """Tokens, parents and summed log-probabilities, `[row, candidate]` each."""
        rows, topk = bonus.shape[0], self.topk
        at = jnp.arange(rows, dtype=jnp.int32)[:, None]
        hidden = self._forward(params, pools, row, bonus[:, None], hidden[:, None], kv_len)
        rank, token = self._best(params, hidden)
        rank, token = rank[:, 0], token[:, 0]
        tokens, ranks = [token], [rank]
        parents = [jnp.full((rows, topk), -1, jnp.int32)]
        # The frontier: tokens, their ranks, their place among the candidates, and the hidden vectors before.
        place = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32)[None], (rows, topk))
        hidden = jnp.broadcast_to(hidden, (rows, topk, hidden.shape[2]))
        for step in range(1, self.steps):
            hidden = self._forward(params, pools, row, token, hidden, kv_len)
            log_prob, child = self._best(params, hidden)
            of_child = (rank[:, :, None] + log_prob).reshape(rows, topk * topk)
            first = topk + (step - 1) * topk * topk
            tokens.append(child.reshape(rows, topk * topk))
            ranks.append(of_child)
            parents.append(jnp.repeat(place, topk, axis=1))
            rank, best = jax.lax.top_k(of_child, topk)
            token = tokens[-1][at, best]
            place = (first + best).astype(jnp.int32)
            hidden = hidden[at, best // topk]
        return (
            jnp.concatenate(tokens, axis=1),
            jnp.concatenate(parents, axis=1),
            jnp.concatenate(ranks, axis=1),
        )

    def _best(self, params: Any, hidden: Array) -> tuple[Array, Array]:
        """Log-probabilities and tokens `[row, branch, topk]` of the likeliest tokens behind each branch."""
        log_probs = jax.nn.log_softmax(self.head(params, hidden), axis=-1)
        best, token = jax.lax.top_k(log_probs, self.topk)
        return best, token.astype(jnp.int32)

    def _forward(
        self, params: Any, pools: Pools, row: Array, token: Array, hidden: Array, kv_len: Array
    ) -> Array:
        """One step of the head on `[row, branch]` tokens; every query is at the last committed position."""
        rows, branches = token.shape
        positions = jnp.broadcast_to(jnp.maximum(kv_len - 1, 0)[:, None], (rows, branches))
        k, v, pages = pools.kv.k[self.layer], pools.kv.v[self.layer], pools.table.pages[row]

        def attend(q: Array, scale: float) -> Array:
            q = q.reshape(rows, branches, *q.shape[1:])
            out = paged_attention(q, k, v, pages, positions, kv_len, scale=scale, page_size=self.page_size)
            return out.reshape(rows * branches, *out.shape[2:])

        out = self.step(
            params,
            token.reshape(-1),
            hidden.reshape(rows * branches, -1),
            positions.reshape(-1),
            attend,
        )
        return out.reshape(rows, branches, -1)


def pool_size(topk: int, steps: int) -> int:
    """Candidates that `steps` steps of `topk` branches draft: 36 for 4 and 3, so that no 64 nodes are had."""
    return topk + (steps - 1) * topk * topk
