"""Decides: which prefixes are cached, who owns each slot, what a step does. Never imports JAX."""

from .allocator import SlotAllocator as SlotAllocator
from .chunking import num_blocks as num_blocks
from .key import Stamp as Stamp
from .key import TokenBuffer as TokenBuffer
from .key import extend_hash as extend_hash
from .key import path_hash as path_hash
from .key import token_bytes as token_bytes
from .plan import Buckets as Buckets
from .plan import build_plan as build_plan
from .plan import make_buckets as make_buckets
from .prefix_cache import NullPrefixCache as NullPrefixCache
from .prefix_cache import PrefixCache as PrefixCache
from .prefix_cache import make_prefix_cache as make_prefix_cache
from .results import Evicted as Evicted
from .results import Inserted as Inserted
from .results import Lease as Lease
from .results import Match as Match
from .sequence import Sequence as Sequence
from .sequence import Status as Status
from .stats import CacheStats as CacheStats
