"""What changed in the cache, for routers and other watchers: which blocks exist, and which have a state.

The first three kinds of event have the names and fields that vLLM and SGLang publish; the other two say where
a recurrent state can be resumed, without which KV blocks of a hybrid model are of no use. A block is a page.
Its hash covers all tokens up to its end and the namespace, so equal hashes mean equal prefixes, on every
server: SHA-256 of the hash before and the block's tokens (little-endian int32), its first 8 bytes as a signed
number.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from mambacache_jax.host.key import TOKEN_BYTES
from mambacache_jax.host.namespace import AnyNamespace, Namespace
from mambacache_jax.host.node import Node
from mambacache_jax.host.tree import RadixTree

MEDIUM = "GPU"
"""What the two systems call the memory of the accelerator, whichever it is."""


class BlockStored(NamedTuple):
    """Blocks that follow one another have KV now.

    Attributes:
      block_hashes: one each.
      parent_block_hash: of the block before them; None where they start a sequence.
      token_ids: tokens of all of them.
      block_size: tokens a block.
      lora_id: the namespace's adapter if it is a number.
      medium: where the KV lies.
      lora_name: the namespace's adapter if it is a name.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(NamedTuple):
    """These blocks have no KV any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(NamedTuple):
    """Nothing is left of what was told before: neither blocks nor checkpoints."""


class CheckpointStored(NamedTuple):
    """The recurrent state after a block can be resumed.

    Attributes:
      block_hash: of the last block that is folded into it.
      position: tokens folded into it.
      medium: where it lies.
    """

    block_hash: int
    position: int
    medium: str


class CheckpointRemoved(NamedTuple):
    """The recurrent state after a block cannot be resumed any more; the block may well be there still."""

    block_hash: int
    position: int
    medium: str


Event = BlockStored | BlockRemoved | AllBlocksCleared | CheckpointStored | CheckpointRemoved


def as_wire(event: Event) -> list[object]:
    """An event as both systems encode it: its name, then its fields in order."""
    return [type(event).__name__, *event]


class EventLog:
    """Events not fetched yet, and the hashes of the blocks of every node.

    It keeps `limit` events. Where more pile up they are dropped, and the next fetch tells the whole tree.
    """

    def __init__(self, tree: RadixTree, page_size: int, limit: int = 65536) -> None:
        self._tree, self._page_size, self._limit = tree, page_size, limit
        self._events: list[Event] = []
        self._hashes: dict[Node, list[int]] = {}
        self._overflown = False

    def fetch(self) -> list[Event]:
        """The events since the last fetch, oldest first; the caller's own list."""
        if self._overflown:
            self._overflown = False
            self._events = self.snapshot()
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[Event]:
        """What there is now, as events that begin with `AllBlocksCleared`."""
        events: list[Event] = [AllBlocksCleared()]
        for node in self._tree.nodes():
            events.append(self._stored(node))
            if node.checkpoint_slot:
                events.append(self._checkpoint(node))
        return events

    def stored(self, node: Node) -> None:
        """A node was added."""
        seed, page_bytes = self._last_hash(node), self._page_size * TOKEN_BYTES
        hashes = []
        for at in range(0, len(node.tokens), page_bytes):
            seed = _digest(seed, node.tokens[at : at + page_bytes])
            hashes.append(_number(seed))
        self._hashes[node] = hashes
        self._append(self._stored(node))

    def split(self, upper: Node, lower: Node) -> None:
        """`lower` was cut: its first part is `upper` now. Nobody outside can tell."""
        count = len(upper.kv) // (self._page_size * TOKEN_BYTES)
        hashes = self._hashes[lower]
        self._hashes[upper], self._hashes[lower] = hashes[:count], hashes[count:]

    def removed(self, node: Node) -> None:
        """A node has left the tree, with the checkpoint that it may have had."""
        if node.checkpoint_slot:
            self.checkpoint_removed(node)
        self._append(BlockRemoved(self._hashes.pop(node), MEDIUM))

    def checkpoint_stored(self, node: Node) -> None:
        """A node has a checkpoint now."""
        self._append(self._checkpoint(node))

    def checkpoint_removed(self, node: Node) -> None:
        """A node has lost its checkpoint."""
        self._append(CheckpointRemoved(self._hashes[node][-1], node.position, MEDIUM))

    def cleared(self) -> None:
        """The whole tree has gone."""
        self._hashes = {}
        self._append(AllBlocksCleared())

    def check_invariants(self) -> None:
        """Raises AssertionError unless the hashes are those of the tree's nodes, one a block."""
        counted = {node: len(node.kv) // (self._page_size * TOKEN_BYTES) for node in self._tree.nodes()}
        kept = {node: len(hashes) for node, hashes in self._hashes.items()}
        assert kept == counted, f"block hashes {kept}, blocks {counted}."

    def _append(self, event: Event) -> None:
        if len(self._events) >= self._limit:
            self._overflown, self._events = True, []
        if not self._overflown:
            self._events.append(event)

    def _stored(self, node: Node) -> BlockStored:
        parent = node.parent
        assert parent is not None
        adapter = node.root.namespace.adapter if isinstance(node.root.namespace, Namespace) else None
        return BlockStored(
            block_hashes=list(self._hashes[node]),
            parent_block_hash=self._hashes[parent][-1] if parent.parent is not None else None,
            token_ids=np.frombuffer(node.tokens, "<i4").tolist(),
            block_size=self._page_size,
            lora_id=adapter if isinstance(adapter, int) else None,
            medium=MEDIUM,
            lora_name=adapter if isinstance(adapter, str) else None,
        )

    def _checkpoint(self, node: Node) -> CheckpointStored:
        return CheckpointStored(self._hashes[node][-1], node.position, MEDIUM)

    def _last_hash(self, node: Node) -> bytes:
        parent = node.parent
        assert parent is not None
        if parent.parent is not None:
            return self._hashes[parent][-1].to_bytes(8, "big", signed=True)
        return _seed(node.root.namespace)


def _seed(namespace: AnyNamespace) -> bytes:
    """What the first block of a namespace is chained to: no bytes where there is none."""
    return b"" if namespace is None else hashlib.sha256(repr(namespace).encode()).digest()[:8]


def _digest(seed: bytes, block: bytes) -> bytes:
    return hashlib.sha256(seed + block).digest()[:8]


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big", signed=True)
