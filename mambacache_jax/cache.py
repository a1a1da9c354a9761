"""Joins host and device: owns the one reference to the pools, and runs plans on them.

Donation allows one owner. A step takes the pools, XLA reuses their buffers, and what it returns replaces
them here; nothing else may hold a leaf across a step.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from mambacache_jax.config import CacheConfig, EngineConfig, LayerSpec, RecurrentSpec
from mambacache_jax.device import Pools, make_pools, pool_bytes
from mambacache_jax.errors import StampMismatch
from mambacache_jax.host import PrefixCache, make_prefix_cache

Output = TypeVar("Output")


class HybridCache:
    """The prefix cache of one model: `host` decides, the pools hold.

    Attributes:
      host: the radix tree and the slot allocators.
      config: sizes and rules.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], config: CacheConfig, engine: EngineConfig, dtype: str
    ) -> None:
        """Allocates the pools.

        Args:
          specs: the model's layers; at least one recurrent, else a plain KV cache is what is wanted.
          config: sizes and rules.
          engine: rows and context of the request table.
          dtype: the model's dtype.
        """
        if not any(isinstance(spec, RecurrentSpec) for spec in specs):
            raise ValueError("The model has no recurrent layer, so there is no state to keep checkpoints of.")
        self.config = config
        if config.num_shards != 1:
            raise ValueError(
                f"A HybridCache owns the pools of one shard, CacheConfig.num_shards is {config.num_shards}. "
                f"Make one for each, or use a PrefixCache with pools of your own."
            )
        self.host: PrefixCache = make_prefix_cache(config)
        self._pools = make_pools(specs, config, engine, dtype)

    @property
    def pools(self) -> Pools:
        """The pools, to look at; the next step deletes these buffers."""
        return self._pools

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV and SSM pools on the device."""
        return pool_bytes(self._pools)

    def run(self, program: Callable[[Pools, np.ndarray], tuple[Pools, Output]], plan: np.ndarray) -> Output:
        """Enqueues one step: `program` takes the pools donated and returns them first. Does not wait."""
        self._pools, output = program(self._pools, plan)
        return output

    def replace_pools(self, change: Callable[[Pools], Pools]) -> None:
        """Puts changed pools in place, for tests and tools that poison or load slots between steps."""
        self._pools = change(self._pools)

    def check_stamp(self, slot: int, position: int) -> None:
        """Waits for the device, and raises StampMismatch unless it wrote `slot` at `position`."""
        written = int(np.asarray(self._pools.ssm.position)[slot])
        if written != position:
            raise StampMismatch(
                f"SSM slot {slot} is offered as the state after {position} tokens, "
                f"but the device last wrote it after {written}."
            )
