"""A node of the radix tree: a run of tokens, their KV slots, and perhaps a checkpoint at its end."""

from types import MappingProxyType
from typing import cast

import numpy as np

from mambacache_jax.host.namespace import AnyNamespace
from mambacache_jax.host.stats import Counts

NO_KV = np.zeros(0, np.int32)
NO_KV.flags.writeable = False

_NO_CHILDREN = cast("dict[bytes, Node]", MappingProxyType({}))


class Node:
    """A run of tokens on one path. Compared and hashed by identity, and never copied.

    Runs and slots are kept as bytes: these compare, cut and join without the cost of making an array.

    Attributes:
      tokens: the run as `key.token_bytes`, whole pages, not empty.
      kv: KV slots as int32 bytes, one a token.
      parent: None only for a root and for a node that has left the tree.
      children: by the bytes of their first page; changed by `add_child` and `remove_child` alone.
      position: tokens from the start of the sequence to this node's end.
      checkpoint_slot: SSM slot of the state at `position`, or 0: the node is a tombstone.
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
        "kv",
        "parent",
        "position",
        "queued",
        "removed",
        "root",
        "ssm_lock",
        "stamp",
        "tokens",
    )

    def __init__(self, tokens: bytes, kv: bytes, parent: "Node | None", position: int, stamp: int) -> None:
        self.tokens = tokens
        self.kv = kv
        self.parent = parent
        # Most nodes are leaves, and share one empty mapping.
        self.children = _NO_CHILDREN
        self.position = position
        self.stamp = stamp
        self.checkpoint_slot = self.held = self.ssm_lock = 0
        self.queued = self.removed = False
        self.root: Root = cast("Root", self) if parent is None else parent.root

    @property
    def kv_slots(self) -> np.ndarray:
        """int32 KV slots, read-only."""
        return np.frombuffer(self.kv, np.int32)

    def add_child(self, page: bytes, child: "Node") -> None:
        """Files a child under its first page."""
        if self.children:
            self.children[page] = child
        else:
            self.children = {page: child}

    def remove_child(self, page: bytes) -> None:
        """Takes a child out."""
        if len(self.children) == 1:
            self.children = _NO_CHILDREN
        else:
            del self.children[page]

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
      owner: the tree that it is the root of.
    """

    __slots__ = ("counts", "leases", "namespace", "owner", "pins")

    def __init__(self, namespace: AnyNamespace, counts: Counts, owner: object = None) -> None:
        super().__init__(b"", b"", None, 0, 0)
        self.namespace, self.counts, self.owner = namespace, counts, owner
        self.leases = self.pins = 0
