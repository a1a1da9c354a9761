"""A checkpoint's config.json, read so that no key that could change the model is passed over."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")

_REQUIRED = object()

_PROVENANCE = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "model_type",
    "tokenizer_class",
    "transformers_version",
}
_RUNNING = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "dtype",
    "torch_dtype",
}
_OUTPUTS = {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"}
_KEPT = {"keys_to_ignore_at_inference", "logits_to_keep", "num_logits_to_keep", "use_mamba_kernels"}
_TRAINING = {"attention_dropout", "hidden_dropout", "initializer_range", "rescale_prenorm_residual"}
_LOSSES = {
    "pretraining_tp",
    "router_aux_loss_coef",
    "z_loss_coefficient",
    "id2label",
    "label2id",
    "problem_type",
}
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"}
_LIMITS = {"max_position_embeddings", "model_max_length", "mamba_chunk_size", "chunk_size_feed_forward"}

_HARMLESS = _PROVENANCE | _RUNNING | _OUTPUTS | _KEPT | _TRAINING | _LOSSES | _TOKENS | _LIMITS
"""Keys that any config may have and that do not change what the network computes."""


class Settings:
    """The keys of one config, each of which must be taken, expected or harmless by the time of `finish`.

    Attributes:
      where: names the config in errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Wraps the keys and values of a JSON object."""
        self.where = where
        self._values = dict(values)
        self._known = set(_HARMLESS)

    def __contains__(self, name: str) -> bool:
        """Whether the key is there, with a value that is not null."""
        return self._values.get(name) is not None

    def take(self, *names: str, kind: type[T], default: Any = _REQUIRED) -> T:
        """The value of the first of `names` that is there and not null.

        Args:
          *names: a key and its other spellings.
          kind: the value's type; an int counts as a float.
          default: what an absent key means, of type `kind` or None.

        Raises:
          ValueError: the key is absent and has no default, or its value has another type.
        """
        self._known.update(names)
        found = [name for name in names if name in self]
        if not found:
            if default is _REQUIRED:
                raise ValueError(f"{self.where}: the key {' or '.join(map(repr, names))} is missing.")
            return default
        value = self._values[found[0]]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self.where}: {found[0]!r} must be {kind.__name__}, got {value!r}.")
        return cast(T, value)

    def expect(self, name: str, *supported: Any) -> None:
        """Accepts a key as long as its value is among `supported`; an absent key or null always is.

        Raises:
          ValueError: it has another value; the message lists those that are supported.
        """
        self._known.add(name)
        if name in self and self._values[name] not in supported:
            options = " or ".join(map(repr, supported)) or "null"
            raise ValueError(f"{self.where}: {name!r} is {self._values[name]!r}; supported is {options}.")

    def pass_over(self, *names: str) -> None:
        """Accepts keys whose values do not change what the network computes."""
        self._known.update(names)

    def finish(self) -> None:
        """Ends the reading.

        Raises:
          ValueError: keys are left that nothing took; the message names them and lists what is supported.
        """
        unknown = sorted(name for name in self._values if name not in self._known and name in self)
        if unknown:
            raise ValueError(
                f"{self.where}: unsupported {_listed(unknown)}. Supported are {_listed(self._known)}."
            )


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object of a config file; `{"__float__": "Infinity"}` stands for a float in it.

    Raises:
      ValueError: the file is not a JSON object.
    """

    def as_float(found: dict[str, Any]) -> Any:
        return float(found["__float__"]) if found.keys() == {"__float__"} else found

    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=as_float)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, got {type(values).__name__}.")
    return values


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
