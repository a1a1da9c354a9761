"""Finds a model by name."""

from pathlib import Path

from mambacache_jax.models import tiny
from mambacache_jax.models.model import Model


def load(name_or_folder: str | Path) -> Model:
    """Loads a model.

    Args:
      name_or_folder: "tiny", the model that comes with the package.

    Raises:
      ValueError: there is no such model.
    """
    if str(name_or_folder) == "tiny":
        return tiny.load()
    raise ValueError(f"No model {str(name_or_folder)!r}: the one supported is 'tiny', which is built in.")
