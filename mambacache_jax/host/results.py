"""What the calls of `PrefixCache` return."""

from typing import NamedTuple

import numpy as np

from mambacache_jax.host.node import Node


class Match(NamedTuple):
    """What the cache has of a prompt. Good for `lock` until slots are evicted, allocated or reset.

    Attributes:
      prefix_len: tokens with KV and a checkpoint, the deepest such position; a multiple of the page size.
      kv_slots: int32 KV slots of `[0, prefix_len)`, a copy.
      checkpoint_slot: SSM slot of the state at `prefix_len`; 0, the zero state, if that is 0.
      kv_len: tokens with KV, checkpoint or not; a multiple of the page size.
      node: where the match ends.
    """

    prefix_len: int
    kv_slots: np.ndarray
    checkpoint_slot: int
    kv_len: int
    node: Node

    @property
    def branch_position(self) -> int | None:
        """Where a checkpoint is missing though KV is shared: one there lets the next prompt hit."""
        return self.kv_len if self.kv_len > self.prefix_len else None


class Inserted(NamedTuple):
    """What an insert did.

    Attributes:
      prefix_len: tokens that the tree already had.
      kv_slots: int32 slots that hold the positions from `kv_start` to the last whole page, a copy.
      freed_kv: int32 slots of the caller's that were duplicates and are free now.
      adopted: the tree owns the checkpoint slot; otherwise it is still the caller's.
      node: the node that ends at `position`.
    """

    prefix_len: int
    kv_slots: np.ndarray
    freed_kv: np.ndarray
    adopted: bool
    node: Node

    @property
    def position(self) -> int:
        """The tree owns the KV slots of all positions below; 0 where nothing is kept."""
        return self.node.position


class Evicted(NamedTuple):
    """How many slots an eviction freed.

    Attributes:
      kv: KV slots.
      ssm: SSM slots, those of evicted leaves included.
    """

    kv: int
    ssm: int


class Lease:
    """A lock, to be given back with `PrefixCache.unlock`. It remembers exactly what it locked.

    Attributes:
      node: the node whose path is held; a root holds nothing.
      ssm: the node's checkpoint is locked as well.
      released: it has been given back.
    """

    __slots__ = ("node", "released", "ssm")

    def __init__(self, node: Node, ssm: bool) -> None:
        self.node, self.ssm, self.released = node, ssm, False

    def __repr__(self) -> str:
        return f"Lease({self.node}, ssm={self.ssm}, released={self.released})"
