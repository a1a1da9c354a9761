"""The cache that keeps nothing, for runs without prefix caching."""

from mambacache_jax.config import CacheConfig
from mambacache_jax.host.allocator import Slots
from mambacache_jax.host.key import TOKEN_BYTES, Stamp, Tokens, token_bytes
from mambacache_jax.host.namespace import AnyNamespace
from mambacache_jax.host.node import NO_KV
from mambacache_jax.host.prefix_cache import PrefixCache
from mambacache_jax.host.results import Inserted, Lease


class NullPrefixCache(PrefixCache):
    """The same allocators without a tree: nothing is found and nothing is kept."""

    def insert(
        self,
        tokens: Tokens,
        kv_slots: Slots,
        checkpoint_slot: int = 0,
        *,
        namespace: AnyNamespace = None,
        stamp: Stamp | None = None,
        kv_start: int | None = None,
        length: int | None = None,
        lease: Lease | None = None,
        shard: int = 0,
    ) -> Inserted:
        """Takes nothing over: every slot is still the caller's."""
        key = token_bytes(tokens)
        num_tokens = len(key) // TOKEN_BYTES if length is None else length
        kv_start = kv_start or 0
        slots = self._shards[shard].caller_slots(kv_slots, kv_start, num_tokens)
        end = num_tokens - num_tokens % self._page_size
        return Inserted(0, slots[: max(0, end - kv_start)].copy(), NO_KV, False, None, shard, key)


def make_prefix_cache(config: CacheConfig) -> PrefixCache:
    """A cache that keeps prefixes, or with `prefix_caching=False` one that keeps none."""
    return PrefixCache(config) if config.prefix_caching else NullPrefixCache(config)
