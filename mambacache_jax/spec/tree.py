"""Draft trees on the device, one a row."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class DraftTree(NamedTuple):
    """What one verify pass runs through the target.

    Attributes:
      tokens: `[row, node]`; node 0 is the bonus token, which the target sampled and has not seen yet.
      parent: `[row, node]`, an earlier node; -1 at node 0 alone. Anything at padding nodes.
      node_len: nodes of each row; 1 without drafts, 0 for a padding row.
    """

    tokens: Int32[Array, "row node"]
    parent: Int32[Array, "row node"]
    node_len: Int32[Array, " row"]


def no_drafts(tokens: Int32[Array, " row"], live: Bool[Array, " row"], num_nodes: int) -> DraftTree:
    """Trees of the bonus token alone, padded to `num_nodes`: plain decoding as a round of speculation."""
    rows = tokens.shape[0]
    return DraftTree(
        tokens=jnp.zeros((rows, num_nodes), jnp.int32).at[:, 0].set(tokens),
        parent=jnp.full((rows, num_nodes), -1, jnp.int32),
        node_len=live.astype(jnp.int32),
    )


def live_nodes(tree: DraftTree) -> Bool[Array, "row node"]:
    """Whether a node is no padding."""
    return jnp.arange(tree.parent.shape[1], dtype=jnp.int32)[None, :] < tree.node_len[:, None]


def hops(tree: DraftTree, count: int) -> Int32[Array, "hop row node"]:
    """The `0..count`-th ancestor of each node; -1 from the committed state on and for padding."""
    rows = jnp.arange(tree.parent.shape[0], dtype=jnp.int32)[:, None]
    node = jnp.arange(tree.parent.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(live_nodes(tree), node, -1)
    found = [at]
    for _ in range(count):
        # Index -1 is read by select alone: what lies there is not used.
        at = jnp.where(at < 0, -1, tree.parent[rows, jnp.maximum(at, 0)])
        found.append(at)
    return jnp.stack(found)


def node_depth(tree: DraftTree, depth: int) -> Int32[Array, "row node"]:
    """Ancestors of each node, 0 for padding nodes; `depth` bounds the nodes of a path."""
    return jnp.sum(hops(tree, depth)[1:] >= 0, axis=0, dtype=jnp.int32)


def paths(tree: DraftTree, depth: int) -> Int32[Array, "row node depth"]:
    """The ancestor of each node at each depth, the node itself at its own; -1 below it and for padding."""
    up, level = hops(tree, depth - 1), node_depth(tree, depth)
    rows, num_nodes = tree.parent.shape
    back = level[:, :, None] - jnp.arange(depth, dtype=jnp.int32)[None, None, :]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None, None]
    node = jnp.arange(num_nodes, dtype=jnp.int32)[None, :, None]
    return jnp.where(back >= 0, up[jnp.clip(back, 0, depth - 1), row, node], -1)
