"""Finds a model by name."""

from pathlib import Path

from mambacache_jax.models import tiny
from mambacache_jax.models.model import Model


def load(name_or_folder: str | Path) -> Model:
    """Loads a model.

    Args:
      name_or_folder: "tiny", the model that comes with the package, or a folder that its training script
        wrote.

    Raises:
      ValueError: there is no such model.
    """
    if str(name_or_folder) == "tiny":
        return tiny.load()
    if (Path(name_or_folder) / tiny.WEIGHTS_FILE).is_file():
        return tiny.load(Path(name_or_folder))
    raise ValueError(
        f"No model {str(name_or_folder)!r}: supported are 'tiny', which is built in, and a folder with a "
        f"{tiny.WEIGHTS_FILE} of its training script."
    )
