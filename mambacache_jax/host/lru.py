"""The two orders of eviction. Neither is rebuilt by an eviction, and a match costs them one step at most."""

import heapq
from collections import OrderedDict
from itertools import islice

from mambacache_jax.host.node import Node


class LeafQueue:
    """Leaves that no lease holds, least recently used first; evicting one frees its KV and its checkpoint.

    A lazy heap with one entry a node. Using a node changes nothing here: an entry that turns out older than
    its node is pushed again with the node's stamp, and one whose node has grown a child or is held is
    dropped. It comes back when the node is a free leaf once more.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Node]] = []

    def push(self, node: Node) -> None:
        """Adds a leaf that nobody holds, unless it has an entry."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.stamp, node))

    def pop(self) -> Node | None:
        """Takes out the least recently used leaf; None if there is none."""
        heap = self._heap
        while heap:
            stamp, node = heap[0]
            if node.children or node.held:
                heapq.heappop(heap)
                node.queued = False
            elif stamp != node.stamp:
                heapq.heapreplace(heap, (node.stamp, node))
            else:
                heapq.heappop(heap)
                node.queued = False
                return node
        return None

    def purge(self) -> None:
        """Drops the entries of nodes that have left the tree otherwise than by `pop`."""
        self._heap = [(stamp, node) for stamp, node in self._heap if not node.removed]
        heapq.heapify(self._heap)

    def refresh(self) -> None:
        """Sorts anew after stamps were set to earlier ones, which a lazy entry cannot notice."""
        self._heap = [(node.stamp, node) for _, node in self._heap]
        heapq.heapify(self._heap)

    def nodes(self) -> list[Node]:
        """The node of every entry, in no order."""
        return [node for _, node in self._heap]


class CheckpointOrder(OrderedDict[Node, None]):
    """Nodes with a checkpoint, least recently used first; evicting one leaves a tombstone."""

    def oldest_unlocked(self, count: int) -> list[Node]:
        """The first `count` whose checkpoint no lease holds, or as many as there are."""
        return list(islice((node for node in self if not node.ssm_lock), count))
