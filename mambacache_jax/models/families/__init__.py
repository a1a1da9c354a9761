"""Families of checkpoints, by the `model_type` of their config."""

from mambacache_jax.models.families import bamba, falcon_h1, granitemoehybrid, kimi_linear, nemotron_h, qwen3
from mambacache_jax.models.families.family import Family as Family

FAMILIES: dict[str, Family] = {
    "bamba": bamba.FAMILY,
    "falcon_h1": falcon_h1.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "qwen3_5": qwen3.QWEN3_5,
    "qwen3_5_moe": qwen3.QWEN3_5,
    "qwen3_5_moe_text": qwen3.QWEN3_5,
    "qwen3_5_text": qwen3.QWEN3_5,
    "qwen3_next": qwen3.QWEN3_NEXT,
}
