"""The tree drawn as text, and as plain data for other drawings."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mambacache_jax.host.namespace import AnyNamespace, Namespace
from mambacache_jax.host.node import Node
from mambacache_jax.host.tree import RadixTree

Decode = Callable[[np.ndarray], str]


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


def _plain(namespace: AnyNamespace) -> str | int | None:
    return repr(namespace) if isinstance(namespace, bytes | Namespace) else namespace
