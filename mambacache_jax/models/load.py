"""Finds a model by name."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mambacache_jax.models import tiny
from mambacache_jax.models.checkpoint import Checkpoint, Settings, load_params, read_config
from mambacache_jax.models.families import FAMILIES, Family
from mambacache_jax.models.hub_tokenizer import FILE as TOKENIZER
from mambacache_jax.models.hub_tokenizer import HubTokenizer
from mambacache_jax.models.model import Model
from mambacache_jax.models.tokenizer import NoTokenizer

CONFIG = "config.json"


def load(name_or_folder: str | Path, *, dtype: str | None = None, progress: bool = False) -> Model:
    """Loads a model.

    Args:
      name_or_folder: "tiny", the model that comes with the package; a folder that its training script
        wrote; or a checkpoint as hubs keep them, a folder with config.json and safetensors.
      dtype: of a checkpoint's parameters and activations, "float32" or "bfloat16"; by default float32 on a
        CPU and bfloat16 on an accelerator. The built-in model is float32.
      progress: show a progress bar while a checkpoint's weights are read.

    Raises:
      ValueError: there is no such model, its architecture or a key of its config is not supported, its
        tensors do not fit its config, or `dtype` is unknown.
    """
    folder = Path(name_or_folder)
    if str(name_or_folder) == "tiny":
        return tiny.load()
    if (folder / tiny.WEIGHTS_FILE).is_file():
        return tiny.load(folder)
    model, family, config = _read(folder, dtype)
    with contextlib.ExitStack() as stack:
        checkpoint = Checkpoint(folder, family.renames, stack)
        params = load_params(
            checkpoint, model.params, family.rules(config), ignored=family.ignored, progress=progress
        )
    tokenizer = HubTokenizer(folder) if (folder / TOKENIZER).is_file() else model.tokenizer
    return dataclasses.replace(model, params=params, tokenizer=tokenizer)


def abstract(name_or_folder: str | Path, *, dtype: str | None = None) -> Model:
    """A model without its weights, to plan memory and to compile for: a checkpoint's config.json is enough.

    Args:
      name_or_folder: as for `load`.
      dtype: as for `load`.

    Returns:
      A model whose `params` are shapes and dtypes, without a checkpoint's tokenizer.

    Raises:
      ValueError: as for `load`, but for what is wrong with tensors.
    """
    if str(name_or_folder) == "tiny" or (Path(name_or_folder) / tiny.WEIGHTS_FILE).is_file():
        return tiny.abstract()
    return _read(Path(name_or_folder), dtype)[0]


def _read(folder: Path, dtype: str | None) -> tuple[Model, Family, Any]:
    """A checkpoint's model without weights and tokenizer, its family, and the family's config."""
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"No model {str(folder)!r}: supported are 'tiny', which is built in, a folder with a "
            f"{tiny.WEIGHTS_FILE} of its training script, and a checkpoint folder with a {CONFIG}."
        )
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {dtype!r}.")
    values = read_config(folder / CONFIG)
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        raise ValueError(
            f"{folder / CONFIG}: model_type {values.get('model_type')!r} (architectures "
            f"{values.get('architectures')}) is not supported; supported are {', '.join(FAMILIES)}."
        )
    config = family.parse(Settings(values, str(folder / CONFIG)))
    network = nnx.eval_shape(lambda: family.network(config, jnp.dtype(dtype), nnx.Rngs(0)))
    graphdef, params = nnx.split(network)
    model = Model(
        name=str(folder),
        specs=network.specs,
        vocab_size=config.ends.vocab_size,
        max_context=config.ends.max_context,
        eos_token_ids=_end_tokens(folder, values),
        tokenizer=NoTokenizer(str(folder)),
        dtype=dtype,
        params=params,
        graphdef=graphdef,
        mtp_layer=network.mtp_layer,
        state_dtype=config.ends.state_dtype,
    )
    return model, family, config


def _end_tokens(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end an answer: those of generation_config.json, or else of the config."""
    path = folder / "generation_config.json"
    generation = read_config(path) if path.is_file() else {}
    for source in (generation, values, values.get("text_config", {})):
        if (found := source.get("eos_token_id")) is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()
