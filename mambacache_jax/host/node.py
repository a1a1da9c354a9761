"""A node of the radix tree: a run of tokens, their KV slots, and perhaps a checkpoint at its end."""

from typing import cast

import numpy as np

from mambacache_jax.host.namespace import AnyNamespace
from mambacache_jax.host.stats import Counts

NO_KV = np.zeros(0, np.int32)


class Node:
    """A run of tokens on one path. Compared and hashed by identity, and never copied.

    Attributes:
      tokens: the run as `key.token_bytes`, whole pages, not empty.
      kv_slots: int32, one a token; the tree's own array.
      parent: None only for a root and for a node that has left the tree.
      children: by the bytes of their first page.
      position: tokens from the start of the sequence to this node's end.
      checkpoint_slot: SSM slot of the state at `position`, or 0: the node is a tombstone.
      token_hash: hash of the path's tokens, or None while nobody has asked.
      stamp: when it, or a child that is gone, was last used, by the tree's counter.
      held: leases on this node, plus children that are held. Held nodes are never evicted.
      ssm_lock: leases on its checkpoint, there or still to come.
      queued: it has an entry in the queue of leaves.
      removed: it has left the tree.
      root: the start of its path.
    """

    __slots__ = (
        "checkpoint_slot",
        "children",
        "held",
        "kv_slots",
        "parent",
        "position",
        "queued",
        "removed",
        "root",
        "ssm_lock",
        "stamp",
        "token_hash",
        "tokens",
    )

    def __init__(
        self, tokens: bytes, kv_slots: np.ndarray, parent: "Node | None", position: int, stamp: int
    ) -> None:
        self.tokens = tokens
        self.kv_slots = kv_slots
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.position = position
        self.checkpoint_slot = 0
        self.token_hash: int | None = None
        self.stamp = stamp
        self.held = 0
        self.ssm_lock = 0
        self.queued = False
        self.removed = False
        self.root: Root = cast("Root", self) if parent is None else parent.root

    def __lt__(self, other: "Node") -> bool:
        # Breaks ties in the queue. Only nodes of one path can carry the same stamp; the deeper goes first.
        return self.position > other.position

    def __repr__(self) -> str:
        return f"Node(position={self.position}, checkpoint_slot={self.checkpoint_slot})"


class Root(Node):
    """The start of all paths of one namespace: no tokens, never locked, never evicted.

    Attributes:
      namespace: whose root it is.
      counts: the namespace's counts, which outlive the root.
      leases: leases on the nodes below, those of pins included.
      pins: leases of pins among them.
    """

    __slots__ = ("counts", "leases", "namespace", "pins")

    def __init__(self, namespace: AnyNamespace, counts: Counts) -> None:
        super().__init__(b"", NO_KV, None, 0, 0)
        self.namespace, self.counts = namespace, counts
        self.leases = self.pins = 0
