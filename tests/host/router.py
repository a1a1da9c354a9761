"""A router that knows a shard of the cache by its events alone, and the definition of a block's hash."""

import functools
import hashlib
import struct

from mambacache_jax.host import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CheckpointRemoved,
    CheckpointStored,
    Event,
)
from mambacache_jax.host.namespace import AnyNamespace


@functools.cache
def block_hash(namespace: AnyNamespace, tokens: tuple[int, ...], page_size: int) -> int:
    """The hash of the last block of a prefix, of whole pages."""
    before = tokens[:-page_size]
    if before:
        seed = block_hash(namespace, before, page_size).to_bytes(8, "big", signed=True)
    else:
        seed = b"" if namespace is None else hashlib.sha256(repr(namespace).encode()).digest()[:8]
    block = struct.pack(f"<{page_size}i", *tokens[-page_size:])
    return int.from_bytes(hashlib.sha256(seed + block).digest()[:8], "big", signed=True)


class Router:
    """Blocks and checkpoints that exist, as the events tell it; a contradiction fails at once.

    Attributes:
      blocks: the tokens up to the end of each block, by its hash.
      checkpoints: positions by the hash of the last block before them.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.checkpoints: dict[int, int] = {}

    def replay(self, events: list[Event]) -> None:
        for event in events:
            self._replay(event)

    def _replay(self, event: Event) -> None:
        match event:
            case AllBlocksCleared():
                self.blocks, self.checkpoints = {}, {}
            case BlockStored():
                assert event.block_size == self.page_size
                assert len(event.token_ids) == self.page_size * len(event.block_hashes)
                before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                for index, known in enumerate(event.block_hashes, 1):
                    assert known not in self.blocks
                    self.blocks[known] = (*before, *event.token_ids[: index * self.page_size])
            case BlockRemoved():
                for known in event.block_hashes:
                    assert known not in self.checkpoints
                    del self.blocks[known]
            case CheckpointStored():
                assert event.block_hash not in self.checkpoints
                assert event.position == len(self.blocks[event.block_hash])
                self.checkpoints[event.block_hash] = event.position
            case CheckpointRemoved():
                assert self.checkpoints.pop(event.block_hash) == event.position
