"""Which drafts of a tree are kept.

Lossless rules. With `chosen`, the token that plain decoding would choose behind each node, the run is walked
in the tree for as long as the drafts agree (`walk`): for greedy decoding, and for sampling whose coin is a
function of seed and position, the text is then equal to plain decoding token for token. Where drafts were
*sampled* from distributions that are known, recursive rejection (`reject`) keeps more of them and leaves the
distribution of the text as it is. `walk_typical` is faster and changes the text.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from mambacache_jax.spec.tree import DraftTree, live_nodes, node_depth

Sample = Callable[[Array, Array, Array], Array]
"""`(logits [n, vocab], sampling [n, 5], position of the token to choose [n]) -> token [n]`."""


class Accepted(NamedTuple):
    """The run that a round keeps, one a row.

    Attributes:
      path: `[row, depth]` nodes from the bonus token on, 0 behind `length`.
      length: nodes of the run; at least 1, and 0 for a padding row.
      tokens: `[row, depth]`: the token behind each node of the run, 0 behind `length`. The last of them is
        the next bonus token: known, and not seen by the target.
      stopped: the run ends with a stop token or at the limit.
    """

    path: Int32[Array, "row depth"]
    length: Int32[Array, " row"]
    tokens: Int32[Array, "row depth"]
    stopped: Bool[Array, " row"]

    def last_node(self) -> Int32[Array, " row"]:
        """The last node of each run; 0 for a padding row."""
        return _at(self.path, self.length)

    def next_token(self) -> Int32[Array, " row"]:
        """The next bonus token of each row; 0 for a padding row."""
        return _at(self.tokens, self.length)


def _at(x: Array, length: Array) -> Array:
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.where(length > 0, x[rows, jnp.maximum(length - 1, 0)], 0)


def choose(
    sample: Sample,
    logits: Float[Array, "row node vocab"],
    sampling: Int32[Array, "row 5"],
    tree: DraftTree,
    kv_len: Int32[Array, " row"],
    depth: int,
) -> Int32[Array, "row node"]:
    """The token that plain decoding would choose behind each node.

    Args:
      sample: the engine's own sampler, so that coins are the same function of seed and position.
      logits: of the nodes.
      sampling: each row's packed parameters.
      tree: whose nodes they are.
      kv_len: position of the bonus token.
      depth: bounds the nodes of a path.
    """
    rows, num_nodes, vocab = logits.shape
    position = kv_len[:, None] + node_depth(tree, depth) + 1
    chosen = sample(
        logits.reshape(rows * num_nodes, vocab), jnp.repeat(sampling, num_nodes, axis=0), position.reshape(-1)
    )
    return chosen.reshape(rows, num_nodes)


def walk(tree: DraftTree, chosen: Int32[Array, "row node"], depth: int) -> Accepted:
    """The longest run of drafts that are the tokens plain decoding would choose.

    Args:
      tree: siblings may be equal; the first is taken.
      chosen: from `choose`.
      depth: bounds the nodes of a path, and so the length of a run.
    """
    rows = jnp.arange(tree.parent.shape[0], dtype=jnp.int32)
    live = live_nodes(tree)

    def follow(at: Array) -> tuple[Array, Array]:
        hit = live & (tree.parent == at[:, None]) & (tree.tokens == chosen[rows, at][:, None])
        return jnp.argmax(hit, axis=1).astype(jnp.int32), jnp.any(hit, axis=1)

    return _collect(tree, follow, lambda at: chosen[rows, at], depth)


def walk_typical(
    tree: DraftTree,
    chosen: Int32[Array, "row node"],
    logits: Float[Array, "row node vocab"],
    depth: int,
    *,
    lossy: bool,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Accepted:
    """Typical acceptance (Medusa, arXiv 2401.10774): keeps drafts that the target finds likely enough.

    A draft is kept if its probability is at least `min(epsilon, delta * exp(-entropy))`, the likeliest
    sibling first. The text is not that of plain decoding, nor of its distribution.

    Raises:
      ValueError: `lossy` is not True.
    """
    if lossy is not True:
        raise ValueError("Typical acceptance changes the text; it needs lossy=True.")
    rows = jnp.arange(tree.parent.shape[0], dtype=jnp.int32)
    live = live_nodes(tree)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    bound = jnp.minimum(epsilon, delta * jnp.exp(-entropy))

    def follow(at: Array) -> tuple[Array, Array]:
        probs = jnp.exp(log_probs[rows, at])[rows[:, None], tree.tokens]
        kept = live & (tree.parent == at[:, None]) & (probs >= bound[rows, at][:, None])
        return jnp.argmax(jnp.where(kept, probs, -1.0), axis=1).astype(jnp.int32), jnp.any(kept, axis=1)

    return _collect(tree, follow, lambda at: chosen[rows, at], depth)


def _collect(tree, follow, behind, depth: int) -> Accepted:
    """Walks from node 0 with `follow(node) -> (child, found)`; `behind(node)` is the token of the end."""
    at = jnp.zeros_like(tree.node_len)
    going = tree.node_len > 0
    length = going.astype(jnp.int32)
    path, tokens = [at], []
    rows = jnp.arange(tree.parent.shape[0], dtype=jnp.int32)
    for _ in range(depth - 1):
        child, found = follow(at)
        going = going & found
        tokens.append(jnp.where(going, tree.tokens[rows, child], behind(at)))
        at = jnp.where(going, child, at)
        length = length + going.astype(jnp.int32)
        path.append(at)
    tokens.append(behind(at))
    place = jnp.arange(depth, dtype=jnp.int32)[None, :]
    inside = place < length[:, None]
    return Accepted(
        path=jnp.where(inside, jnp.stack(path, axis=1), 0),
        length=length,
        tokens=jnp.where(inside, jnp.stack(tokens, axis=1), 0),
        stopped=jnp.zeros_like(going),
    )


def cut(accepted: Accepted, stop_tokens: Int32[Array, "row stop"], limit: Int32[Array, " row"]) -> Accepted:
    """Ends each run with its first stop token, or where `limit` tokens are behind it.

    The last token is kept and not run through the target, as in plain decoding, so that nothing beyond it
    gets into a state.

    Args:
      accepted: the runs.
      stop_tokens: of each row; -1 where there are fewer.
      limit: tokens that each row may still get, at least 1.
    """
    place = jnp.arange(accepted.tokens.shape[1], dtype=jnp.int32)[None, :]
    inside = place < accepted.length[:, None]
    ends = inside & jnp.any(accepted.tokens[:, :, None] == stop_tokens[:, None, :], axis=2)
    ends = ends | (inside & (place + 1 == limit[:, None]))
    stopped = jnp.any(ends, axis=1)
    first = jnp.argmax(ends, axis=1).astype(jnp.int32) + 1
    length = jnp.where(stopped, first, accepted.length)
    kept = place < length[:, None]
    return Accepted(
        path=jnp.where(kept, accepted.path, 0),
        length=length,
        tokens=jnp.where(kept, accepted.tokens, 0),
        stopped=stopped,
    )


def reject(
    tree: DraftTree,
    target: Float[Array, "row node vocab"],
    draft: Float[Array, "row node vocab"],
    coins: Float[Array, "row node"],
    last_coin: Float[Array, " row"],
    depth: int,
    *,
    with_replacement: bool,
) -> Accepted:
    """Recursive rejection sampling: the text has the target's distribution.

    At a node with target probabilities `p` and draft probabilities `q` its children are tried in order: `x`
    is kept with probability `min(1, p(x) / q(x))`, else `p` becomes the normalised `max(p - q, 0)`, and
    without replacement `q(x)` becomes 0 and `q` is normalised again. When no child is kept the next token
    comes from what is left of `p`. With replacement: SpecInfer, arXiv 2305.09781; without: Sequoia, arXiv
    2402.12374.

    Args:
      tree: the children of a node are in the order in which they were drawn.
      target: probabilities behind each node, as plain sampling draws from them.
      draft: the distribution that each node's first child was drawn from. Wrong for drafts that were not
        drawn, such as the best k.
      coins: uniform in [0, 1), one for each node.
      last_coin: uniform in [0, 1), for the token at the end.
      depth: bounds the nodes of a path.
      with_replacement: siblings were drawn independently, not without replacement.
    """
    follow_row = _reject_row(with_replacement)
    path, length, tokens = jax.vmap(follow_row, in_axes=(0, 0, 0, 0, 0, 0, None))(
        tree, live_nodes(tree), target, draft, coins, last_coin, jnp.arange(depth, dtype=jnp.int32)
    )
    return Accepted(path, length, tokens, jnp.zeros(length.shape, bool))


def trial(
    p: Float[Array, " vocab"], q: Float[Array, " vocab"], token: Int32[Array, ""], with_replacement: bool
) -> tuple[Float[Array, ""], Float[Array, " vocab"], Float[Array, " vocab"]]:
    """The chance to keep a child `token`, and what `p` and `q` become if it is not kept.

    A token that `q` cannot draw (a sibling drawn again without replacement) has no chance.
    """
    chance = jnp.where(q[token] > 0, jnp.minimum(1.0, p[token] / jnp.where(q[token] > 0, q[token], 1.0)), 0.0)
    left = jnp.maximum(p - q, 0.0)
    total = jnp.sum(left)
    # Nothing is left only where p = q to rounding, and then no trial fails.
    p = jnp.where((total > 0) & (q[token] > 0), left / jnp.where(total > 0, total, 1.0), p)
    if with_replacement:
        return chance, p, q
    rest = q.at[token].set(0.0)
    total = jnp.sum(rest)
    return chance, p, rest / jnp.where(total > 0, total, 1.0)


def _reject_row(with_replacement: bool):
    def follow(tree, live, target, draft, coins, last_coin, places):
        def node(n, carry):
            at, p, q, path, length, tokens = carry
            tried = live[n] & (tree.parent[n] == at)
            chance, p_left, q_left = trial(p, q, tree.tokens[n], with_replacement)
            kept = tried & (coins[n] < chance)
            tokens = jnp.where(kept & (places == length - 1), tree.tokens[n], tokens)
            path = jnp.where(kept & (places == length), n, path)
            p = jnp.where(kept, target[n], jnp.where(tried, p_left, p))
            q = jnp.where(kept, draft[n], jnp.where(tried, q_left, q))
            return jnp.where(kept, n, at), p, q, path, length + kept.astype(jnp.int32), tokens

        none = jnp.zeros(places.shape, jnp.int32)
        length = jnp.minimum(tree.node_len, 1)
        start = (jnp.int32(0), target[0], draft[0], none, length, none)
        nodes = jnp.int32(tree.tokens.shape[0])
        _, p, _, path, length, tokens = jax.lax.fori_loop(jnp.int32(1), nodes, node, start)
        mass = jnp.cumsum(p)
        drawn = jnp.sum(mass <= last_coin * mass[-1], dtype=jnp.int32)
        last = jnp.max(jnp.where(p > 0, jnp.arange(p.shape[0], dtype=jnp.int32), 0))
        tokens = jnp.where(places == length - 1, jnp.minimum(drawn, last), tokens)
        return path, length, tokens

    return follow
