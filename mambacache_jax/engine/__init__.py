"""Continuous batching through the hybrid cache."""

from mambacache_jax.engine.compiles import assert_no_recompile as assert_no_recompile
from mambacache_jax.engine.engine import Engine as Engine
from mambacache_jax.engine.types import Completion as Completion
from mambacache_jax.engine.types import Delta as Delta
from mambacache_jax.engine.types import EngineStats as EngineStats
from mambacache_jax.engine.types import Timings as Timings
