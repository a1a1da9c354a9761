"""The arithmetic of draft trees.

A tree is a parent array: `parent[i]` is an earlier node, or -1 for a child of the committed state. In a
verify tree node 0 is the bonus token (sampled by the target and not run through it yet) and every draft
descends from it; a tree of candidates, which `select_best` thins, has no such node.
"""

from collections.abc import Sequence

import numpy as np

MAX_NODES = 64
"""Most nodes of a verify tree, the bonus token included."""


def check_tree(parent: np.ndarray, *, rooted: bool = False, depth: int | None = None) -> None:
    """Refuses what is no draft tree.

    Args:
      parent: int, one a node.
      rooted: all nodes descend from node 0, as in a verify tree.
      depth: most nodes of a path, if that is bounded.

    Raises:
      ValueError: the tree is empty or not an integer vector, a parent does not come before its child, a
        second node continues the committed state, or a path is too long.
    """
    parent = np.asarray(parent)
    if parent.ndim != 1 or not np.issubdtype(parent.dtype, np.integer):
        raise ValueError(f"A draft tree is an integer vector, got {parent.dtype} of shape {parent.shape}.")
    if not len(parent):
        raise ValueError("A draft tree holds at least the bonus token, got no nodes.")
    wrong = np.flatnonzero((parent < -1) | (parent >= np.arange(len(parent))))
    if len(wrong):
        node = wrong[0]
        raise ValueError(f"Node {node} has parent {parent[node]}: neither -1 nor an earlier node.")
    if rooted and (parent[1:] < 0).any():
        node = 1 + np.flatnonzero(parent[1:] < 0)[0]
        raise ValueError(f"Node {node} continues the committed state; only node 0, the bonus token, may.")
    if depth is not None and (longest := int(node_depth(parent).max()) + 1) > depth:
        raise ValueError(f"A path has {longest} nodes, and {depth} are the most.")


def node_depth(parent: np.ndarray) -> np.ndarray:
    """int32 ancestors of each node: 0 for children of the committed state."""
    depth = np.zeros(len(parent), np.int32)
    for node, before in enumerate(parent):
        depth[node] = depth[before] + 1 if before >= 0 else 0
    return depth


def positions(parent: np.ndarray, kv_len: int) -> np.ndarray:
    """int32 position of each node in its sequence: by depth, never by node index."""
    return np.int32(kv_len) + node_depth(parent)


def ancestors(parent: np.ndarray) -> np.ndarray:
    """bool `[node, node]`: whether the second is the first or an ancestor of it."""
    mask = np.eye(len(parent), dtype=bool)
    for node, before in enumerate(parent):
        if before >= 0:
            mask[node] |= mask[before]
    return mask


def path_to(parent: np.ndarray, node: int) -> np.ndarray:
    """int32 nodes from the committed state to `node`, which is the last of them."""
    path = [node]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
    return np.array(path[::-1], np.int32)


def chain(num_nodes: int) -> np.ndarray:
    """The verify tree of one draft run: `num_nodes - 1` drafts behind the bonus token."""
    return np.arange(-1, num_nodes - 1, dtype=np.int32)


def static_tree(branching: Sequence[int]) -> np.ndarray:
    """The verify tree whose nodes at depth `d` have `branching[d]` children each, level by level."""
    parent, level = [-1], [0]
    for children in branching:
        first = len(parent)
        parent.extend(node for node in level for _ in range(children))
        level = list(range(first, len(parent)))
    return np.array(parent, np.int32)


def prefix_tree(runs: Sequence[Sequence[int] | np.ndarray], max_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs of tokens as candidates that share their common beginnings; no two siblings are equal.

    Args:
      runs: earlier ones are kept first.
      max_nodes: nodes to keep; runs are cut where they are used up.

    Returns:
      int32 tokens and parents of at most `max_nodes` candidates.
    """
    children: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parent: list[int] = []
    for run in runs:
        at = -1
        for token in map(int, run):
            if (at, token) not in children:
                if len(tokens) == max_nodes:
                    break
                children[at, token] = len(tokens)
                tokens.append(token)
                parent.append(at)
            at = children[at, token]
    return np.array(tokens, np.int32), np.array(parent, np.int32)


def rooted(tokens: np.ndarray, parent: np.ndarray, bonus: int) -> tuple[np.ndarray, np.ndarray]:
    """Candidates as a verify tree: the bonus token becomes node 0 and all others move up by one."""
    return (
        np.concatenate([[bonus], tokens]).astype(np.int32),
        np.concatenate([[-1], np.asarray(parent) + 1]).astype(np.int32),
    )


def select_best(parent: np.ndarray, log_prob: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """The candidates most likely to be accepted, as EAGLE-2 ranks them (arXiv 2406.16858).

    A node's rank is the sum of `log_prob` along its path, which never rises towards the leaves; among equals
    the shallower node comes first, so that a node is never kept without its parent.

    Args:
      parent: the candidates' tree.
      log_prob: of each candidate after its parent; at most 0, -inf allowed.
      num_nodes: candidates to keep, if there are so many.

    Returns:
      int32 indices of those kept, ascending, and the parents of the tree that they form.

    Raises:
      ValueError: a log-probability is above 0 or NaN, or the tree is none.
    """
    check_tree(parent)
    if not (np.asarray(log_prob) <= 0).all():
        raise ValueError("Log-probabilities of drafts must be at most 0.")
    rank = np.array(log_prob, np.float64)
    for node, before in enumerate(parent):
        if before >= 0:
            rank[node] += rank[before]
    kept = np.lexsort((np.arange(len(parent)), node_depth(parent), -rank))[:num_nodes]
    kept = np.sort(kept).astype(np.int32)
    place = np.full(len(parent) + 1, -1, np.int32)
    place[kept] = np.arange(len(kept))
    return kept, place[np.asarray(parent)[kept]]


def crossing(kv_len: int, accepted: int, interval: int) -> int:
    """Where an accepted run reaches its last track point.

    Args:
      kv_len: tokens before the run.
      accepted: tokens of the run.
      interval: track points are the multiples of it.

    Returns:
      The number of the run's tokens that are folded there, `1..accepted`: a place on the path, which only
      in a chain is also a node index plus one. 0: the run reaches no track point.
    """
    done = (kv_len + accepted) // interval * interval - kv_len
    return max(done, 0)
