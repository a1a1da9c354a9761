"""What the calls of `PrefixCache` return."""

from typing import NamedTuple

import numpy as np

from mambacache_jax.host.node import Node


class Match(NamedTuple):
    """What the cache has of a prompt. Good for `lock` until slots are evicted, allocated or reset.

    Attributes:
      prefix_len: tokens that can be resumed: those with KV and a checkpoint, up to the deepest such position;
        of `match_kv`, all those with KV. A multiple of the page size.
      kv_slots: int32 KV slots of `[0, prefix_len)`, read-only.
      checkpoint_slot: SSM slot of the state at `prefix_len`; 0, the zero state, if that is 0. Always 0 of
        `match_kv`.
      kv_len: tokens with KV, checkpoint or not; a multiple of the page size.
      node: where the match ends, or of `match_kv` the node in which it ends; None where nothing matched.
      shard: whose slots they are.
      key: the tokens that were looked for, as bytes; a lease compares them with those of an insert.
    """

    prefix_len: int
    kv_slots: np.ndarray
    checkpoint_slot: int
    kv_len: int
    node: Node | None
    shard: int
    key: bytes

    @property
    def branch_position(self) -> int | None:
        """Where a checkpoint is missing though KV is shared: one there lets the next prompt hit."""
        return self.kv_len if self.kv_len > self.prefix_len else None


class Inserted(NamedTuple):
    """What an insert did.

    Attributes:
      prefix_len: tokens that the tree already had.
      kv_slots: int32 slots that hold the positions from `kv_start` to the last whole page: the caller's own
        array where the tree had none of them.
      freed_kv: int32 slots of the caller's that were duplicates and are free now.
      adopted: the tree owns the checkpoint slot; otherwise it is still the caller's.
      node: the node that ends at `position`; None where nothing is kept.
      shard: whose slots they are.
      key: the tokens that were inserted, as bytes; a lease compares them with those of the next insert.
    """

    prefix_len: int
    kv_slots: np.ndarray
    freed_kv: np.ndarray
    adopted: bool
    node: Node | None
    shard: int
    key: bytes

    @property
    def position(self) -> int:
        """The tree owns the KV slots of all positions below; 0 where nothing is kept."""
        return 0 if self.node is None else self.node.position


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
      node: the node whose path is held; None holds nothing.
      ssm: the node's checkpoint is locked as well.
      shard: where.
      key: begins with the tokens of the node's path, as bytes; empty where these are not known.
      released: it has been given back.
      pinned: the cache itself keeps it, until `PrefixCache.unpin`.
    """

    __slots__ = ("key", "node", "pinned", "released", "shard", "ssm")

    def __init__(self, node: Node | None, ssm: bool, shard: int, key: bytes) -> None:
        self.node, self.ssm, self.shard, self.key = node, ssm, shard, key
        self.released = self.pinned = False

    def __repr__(self) -> str:
        state = "released" if self.released else "pinned" if self.pinned else "held"
        return f"Lease({self.node}, ssm={self.ssm}, shard={self.shard}, {state})"
