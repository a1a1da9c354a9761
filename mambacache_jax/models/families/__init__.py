"""Families of checkpoints, by the `model_type` of their config."""

from mambacache_jax.models.families import granitemoehybrid
from mambacache_jax.models.families.family import Family as Family

FAMILIES: dict[str, Family] = {
    "granitemoehybrid": granitemoehybrid.FAMILY,
}
