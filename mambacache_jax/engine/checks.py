"""What an engine refuses before it allocates anything."""

import jax

from mambacache_jax.config import CacheConfig, EngineConfig, SpecConfig
from mambacache_jax.layout import CONTEXT_TILE
from mambacache_jax.models import Model

_VERIFIED_DETERMINISTIC = ("cpu",)
"""Platforms on which deterministic mode has been shown to give the same bits under any schedule."""


def check_configs(
    model: Model, cache: CacheConfig | None, config: EngineConfig, spec: SpecConfig | None
) -> None:
    """Refuses sizes and modes that do not go together.

    Raises:
      ValueError: which ones, and why.
    """
    if config.max_context > model.max_context:
        raise ValueError(
            f"max_context={config.max_context} exceeds the model's {model.max_context} positions."
        )
    platform = jax.default_backend()
    if config.deterministic and platform not in _VERIFIED_DETERMINISTIC:
        raise ValueError(
            f"Deterministic mode has not been verified on {platform}, only on "
            f"{', '.join(_VERIFIED_DETERMINISTIC)}."
        )
    if config.deterministic and cache is not None and not _keeps_bits(cache):
        raise ValueError(
            "Deterministic mode needs float32 states and a page_size that divides "
            f"{CONTEXT_TILE}: with others a prefix hit or the page size would change bits."
        )
    if spec is not None and (config.deterministic or config.return_logits):
        raise ValueError("Speculation goes with neither deterministic nor return_logits in EngineConfig.")


def _keeps_bits(cache: CacheConfig) -> bool:
    """Whether deterministic mode has been shown to hold with these sizes."""
    return cache.state_dtype == "float32" and CONTEXT_TILE % cache.page_size == 0
