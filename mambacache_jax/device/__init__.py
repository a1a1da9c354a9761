"""Pools on the device, and the pure functions that read and move them."""

from mambacache_jax.device.context import PooledContext as PooledContext
from mambacache_jax.device.pools import Pools as Pools
from mambacache_jax.device.pools import make_pools as make_pools
from mambacache_jax.device.pools import pool_bytes as pool_bytes
from mambacache_jax.device.request_table import RequestTable as RequestTable
from mambacache_jax.device.ssm_pool import SSMPool as SSMPool
from mambacache_jax.device.ssm_pool import copy_slots as copy_slots
