"""Parameters on disk: one safetensors file, tensors named by their path in the module."""

from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from jax.tree_util import DictKey

StoredDtype = Literal["bfloat16", "float32"]

_STORED = ("bfloat16", "float32")


def names(params: Any) -> list[str]:
    """The tensors' names in the order of `jax.tree.leaves`, such as `layers.0.mixer.in_proj.weight`."""
    return [
        ".".join(str(key.key) for key in path if isinstance(key, DictKey))
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]


def save(path: Path | str, params: Any, *, dtype: StoredDtype = "float32") -> None:
    """Writes the parameters; vectors (norms, biases, decays) stay float32 whatever `dtype` says.

    Args:
      path: the file to write.
      params: a tree of float arrays, as `nnx.split` gives it.
      dtype: of tensors with two axes or more; "bfloat16" rounds them to the nearest.
    """
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    tensors = {
        name: np.ascontiguousarray(
            np.asarray(leaf, np.float32).astype(stored if leaf.ndim > 1 else np.float32)
        )
        for name, leaf in zip(names(params), jax.tree.leaves(params), strict=True)
    }
    # Not save_file: that makes a file only its owner can read.
    Path(path).write_bytes(safetensors.numpy.save(tensors))


def load(path: Path | str, like: Any) -> Any:
    """Reads parameters into the structure of `like`.

    Args:
      path: a safetensors file whose tensors are bfloat16 or float32.
      like: a tree of arrays or `jax.ShapeDtypeStruct`s, as `nnx.split` of the module gives it.

    Returns:
      The same tree with the file's values as float32 arrays.

    Raises:
      ValueError: the file's tensors are not exactly those of `like`; the message lists every difference.
    """
    tensors = safetensors.numpy.load_file(path)
    leaves, structure = jax.tree.flatten(like)
    wanted = dict(zip(names(like), leaves, strict=True))
    faults = [f"missing {name} {tuple(leaf.shape)}" for name, leaf in wanted.items() if name not in tensors]
    faults += [f"unknown {name} {tensor.shape}" for name, tensor in tensors.items() if name not in wanted]
    for name in wanted.keys() & tensors.keys():
        if tensors[name].shape != tuple(wanted[name].shape):
            faults.append(f"{name} has shape {tensors[name].shape}, not {tuple(wanted[name].shape)}")
        if tensors[name].dtype.name not in _STORED:
            faults.append(f"{name} is {tensors[name].dtype.name}, not {' or '.join(_STORED)}")
    if faults:
        raise ValueError(f"{path} does not fit the model: {'; '.join(sorted(faults))}.")
    return jax.tree.unflatten(structure, [jnp.asarray(tensors[name].astype(np.float32)) for name in wanted])
