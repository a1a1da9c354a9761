"""The weights that come with the package, and the record of their training."""

import dataclasses
import importlib.resources
import json
from pathlib import Path
from typing import Any

from flax import nnx

from mambacache_jax.models import weights
from mambacache_jax.models.model import Model
from mambacache_jax.models.tiny.network import TinyConfig, TinyLM
from mambacache_jax.models.tokenizer import ByteTokenizer

MAX_CONTEXT = 4096


WEIGHTS_FILE = "tiny.safetensors"


def load(folder: Path | None = None) -> Model:
    """The trained model: the package's own weights, or those that a training run wrote to `folder`."""
    model = abstract()
    if folder is not None:
        return dataclasses.replace(model, params=weights.load(folder / WEIGHTS_FILE, model.params))
    source = importlib.resources.files("mambacache_jax.models.tiny") / WEIGHTS_FILE
    with importlib.resources.as_file(source) as path:
        return dataclasses.replace(model, params=weights.load(path, model.params))


def abstract() -> Model:
    """The model without weights: `params` holds shapes and dtypes."""
    network = nnx.eval_shape(lambda: TinyLM(TinyConfig(), nnx.Rngs(0)))
    graphdef, like = nnx.split(network)
    return as_model(network, like, graphdef)


def as_model(network: TinyLM, params: Any, graphdef: Any) -> Model:
    """A `Model` of a network that has been split into `graphdef` and `params`."""
    return Model(
        name="tiny",
        specs=network.specs,
        vocab_size=ByteTokenizer.vocab_size,
        max_context=MAX_CONTEXT,
        eos_token_ids=(ByteTokenizer.end_token_id,),
        tokenizer=ByteTokenizer(),
        dtype="float32",
        params=params,
        graphdef=graphdef,
        mtp_layer=network.mtp_layer,
    )


def record() -> dict[str, Any]:
    """How the weights were trained and what they reach; see `training_record.json`."""
    source = importlib.resources.files("mambacache_jax.models.tiny") / "training_record.json"
    return json.loads(source.read_text(encoding="utf-8"))
