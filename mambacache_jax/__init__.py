"""A prefix cache for hybrid attention and state-space language models, on JAX.

Names load on first use, so that `import mambacache_jax.host` never imports JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .budget import Plan as Plan
    from .budget import plan_cache as plan_cache
    from .config import CacheConfig as CacheConfig
    from .config import EngineConfig as EngineConfig
    from .config import SamplingParams as SamplingParams
    from .config import SpecConfig as SpecConfig
    from .engine import Completion as Completion
    from .engine import Delta as Delta
    from .engine import Engine as Engine
    from .engine import EngineStats as EngineStats
    from .engine import assert_no_recompile as assert_no_recompile
    from .errors import MambaCacheError as MambaCacheError
    from .errors import OutOfSlots as OutOfSlots
    from .errors import StampMismatch as StampMismatch
    from .host import PrefixCache as PrefixCache

__all__ = [
    "CacheConfig",
    "Completion",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "MambaCacheError",
    "OutOfSlots",
    "Plan",
    "PrefixCache",
    "SamplingParams",
    "SpecConfig",
    "StampMismatch",
    "assert_no_recompile",
    "plan_cache",
]

_MODULES = {
    "Plan": "budget",
    "plan_cache": "budget",
    "CacheConfig": "config",
    "EngineConfig": "config",
    "SamplingParams": "config",
    "SpecConfig": "config",
    "Completion": "engine",
    "Delta": "engine",
    "Engine": "engine",
    "EngineStats": "engine",
    "assert_no_recompile": "engine",
    "MambaCacheError": "errors",
    "OutOfSlots": "errors",
    "StampMismatch": "errors",
    "PrefixCache": "host",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
