"""All device state of the cache in one donated tree."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from mambacache_jax.config import AttentionSpec, CacheConfig, EngineConfig, LayerSpec, RecurrentSpec
from mambacache_jax.device.kv_pool import KVPool, make_kv_pool
from mambacache_jax.device.request_table import RequestTable, make_request_table
from mambacache_jax.device.ssm_pool import SSMPool, make_ssm_pool
from mambacache_jax.layout import context_pages


class Pools(NamedTuple):
    """KV pool, SSM pool and request table. Every step takes it donated and returns it."""

    kv: KVPool
    ssm: SSMPool
    table: RequestTable


def make_pools(specs: Sequence[LayerSpec], cache: CacheConfig, engine: EngineConfig, dtype: str) -> Pools:
    """Zeroed pools for a model's layers.

    Args:
      specs: one a mixer, in the model's order.
      cache: slots and page size; the null page and the null slot come on top.
      engine: rows and context of the request table.
      dtype: the model's dtype, that of K, V and conv windows.
    """
    attention = [s for s in specs if isinstance(s, AttentionSpec)]
    recurrent = [s for s in specs if isinstance(s, RecurrentSpec)]
    return Pools(
        kv=make_kv_pool(attention, cache.num_kv_slots + cache.page_size, dtype),
        ssm=make_ssm_pool(recurrent, cache.num_ssm_slots + 1, dtype, cache.state_dtype),
        table=make_request_table(engine.max_running + 1, context_pages(engine.max_context, cache.page_size)),
    )


def pool_bytes(pools: Pools) -> int:
    """Bytes of the KV and SSM pools, the request table left out."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves((pools.kv, pools.ssm)))
