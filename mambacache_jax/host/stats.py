"""What a prefix cache can be asked about itself: counts, a picture, and plain data."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

from mambacache_jax.host.node import Node
from mambacache_jax.host.tree import RadixTree

Decode = Callable[[np.ndarray], str]


@dataclasses.dataclass(slots=True)
class Counts:
    """What a cache counts as it goes; `CacheStats` says what each means."""

    matches: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    kv_matched_tokens: int = 0
    inserts: int = 0
    duplicate_kv: int = 0
    adopted: int = 0
    refused: int = 0
    kv_evicted: int = 0
    ssm_evicted: int = 0
    ssm_lost_with_kv: int = 0


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """Counts since the start, then sizes now. Each call of `match` counts, a request's retries included.

    Attributes:
      matches: calls of `match`.
      queried_tokens: tokens that they asked for.
      hit_tokens: of those, tokens with KV and a checkpoint.
      kv_matched_tokens: of those queried, tokens with KV, whether or not a checkpoint follows.
      inserts: calls of `insert`.
      duplicate_kv: KV slots freed by them because the tree had those tokens.
      adopted: checkpoints that the tree took over.
      refused: checkpoints offered where the tree had one.
      kv_evicted: KV slots evicted.
      ssm_evicted: checkpoints evicted to free their slot; their KV stayed.
      ssm_lost_with_kv: checkpoints that went because their leaf's KV did.
      nodes: nodes of the tree.
      tombstones: of those, nodes without a checkpoint.
      kv_used: KV slots that a request or the tree owns, of `kv_total`.
      kv_cached: of those, the tree's; `kv_protected` of them are kept by leases.
      ssm_used: SSM slots that a request or the tree owns, of `ssm_total`.
      ssm_cached: of those, checkpoints; `ssm_protected` of them are kept by leases.
    """

    matches: int
    queried_tokens: int
    hit_tokens: int
    kv_matched_tokens: int
    inserts: int
    duplicate_kv: int
    adopted: int
    refused: int
    kv_evicted: int
    ssm_evicted: int
    ssm_lost_with_kv: int
    nodes: int
    tombstones: int
    kv_total: int
    kv_used: int
    kv_cached: int
    kv_protected: int
    ssm_total: int
    ssm_used: int
    ssm_cached: int
    ssm_protected: int

    @property
    def kv_only_tokens(self) -> int:
        """Tokens whose KV matched beyond the deepest checkpoint, so that they were computed again."""
        return self.kv_matched_tokens - self.hit_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were hits; 0 before the first query."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def render(tree: RadixTree, decode: Decode | None = None) -> str:
    """The tree as text, a line a node: tokens, position, KV slots, checkpoint, locks.

    Args:
      tree: the tree.
      decode: turns a node's int32 tokens into what is shown for them; the first numbers otherwise.
    """
    lines = []
    for namespace, root in tree.roots.items():
        lines.append("root" if namespace is None else f"root {namespace!r}")
        lines.extend(_render_children(root, decode or _numbers))
    return "\n".join(lines)


def to_dict(tree: RadixTree) -> dict[str, Any]:
    """The tree as dicts, lists and numbers that `json` can write."""
    roots = []
    for namespace, root in tree.roots.items():
        built: dict[Node, dict[str, Any]] = {root: {"namespace": _plain(namespace), "children": []}}
        stack: list[Node] = list(root.children.values())
        while stack:
            node = stack.pop()
            assert node.parent is not None
            built[node] = {
                "tokens": tokens_of(node).tolist(),
                "kv_slots": node.kv_slots.tolist(),
                "checkpoint_slot": node.checkpoint_slot,
                "position": node.position,
                "held": node.held,
                "ssm_lock": node.ssm_lock,
                "children": [],
            }
            built[node.parent]["children"].append(built[node])
            stack.extend(reversed(node.children.values()))
        roots.append(built[root])
    return {"roots": roots}


def tokens_of(node: Node) -> np.ndarray:
    """A node's own run of tokens, int32, read-only."""
    return np.frombuffer(node.tokens, "<i4")


def _render_children(root: Node, decode: Decode) -> Iterator[str]:
    stack = _with_rails(root, "")
    while stack:
        node, rail, below = stack.pop()
        state = f"ssm {node.checkpoint_slot}" if node.checkpoint_slot else "tombstone"
        held = f", held {node.held}" if node.held else ""
        locked = f", ssm lock {node.ssm_lock}" if node.ssm_lock else ""
        text = decode(tokens_of(node))
        yield f"{rail}[{text}] to {node.position}: kv {_ranges(node.kv_slots)}, {state}{held}{locked}"
        stack.extend(_with_rails(node, below))


def _with_rails(node: Node, indent: str) -> list[tuple[Node, str, str]]:
    """A node's children, last first, each with what its line and its children's lines start with."""
    children = list(node.children.values())
    rails = [(child, indent + "├── ", indent + "│   ") for child in children[:-1]]
    rails += [(child, indent + "└── ", indent + "    ") for child in children[-1:]]
    return rails[::-1]


def _numbers(tokens: np.ndarray) -> str:
    shown = " ".join(map(str, tokens[:8].tolist()))
    return shown if len(tokens) <= 8 else f"{shown} … {len(tokens)} tokens"


def _ranges(slots: np.ndarray) -> str:
    """Slots with consecutive runs drawn together: `10..13 20`."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    runs = (run for run in np.split(slots, cuts) if len(run))
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def _plain(namespace: Hashable) -> str | int | None:
    return namespace if isinstance(namespace, str | int | None) else repr(namespace)
