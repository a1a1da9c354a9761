"""Safetensors files to parameters, one tensor at a time."""

import contextlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.progress
import safetensors

from mambacache_jax.models import weights
from mambacache_jax.models.checkpoint.rules import Join, OneOf, Rule, Rules, Stack

INDEX = "model.safetensors.index.json"

_FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """The tensors of a folder, opened but not read.

    Attributes:
      folder: where they are.
      names: tensors by the name that rules use.
    """

    def __init__(self, folder: Path, renames: Sequence[tuple[str, str]], stack: contextlib.ExitStack) -> None:
        """Opens the files.

        Args:
          folder: with `model.safetensors`, or shards and their index.
          renames: pairs of a pattern and its replacement, tried on each name in turn, which bring the
            spellings of one family to one.
          stack: closes the files.

        Raises:
          ValueError: there is no such file, a shard is missing, or two tensors have one name.
        """
        self.folder = folder
        self._files = [
            stack.enter_context(safetensors.safe_open(path, framework="np")) for path in _shards(folder)
        ]
        self.names: dict[str, tuple[Any, str]] = {}
        for file in self._files:
            for stored in file.keys():  # noqa: SIM118  (not a mapping)
                name = stored
                for pattern, replacement in renames:
                    name = re.sub(pattern, replacement, name)
                if name in self.names:
                    raise ValueError(f"{folder}: {stored!r} and {self.names[name][1]!r} are the same tensor.")
                self.names[name] = file, stored

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from its file's header."""
        file, stored = self.names[name]
        return tuple(file.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's dtype, as safetensors writes it."""
        file, stored = self.names[name]
        return file.get_slice(stored).get_dtype()

    def read(self, name: str) -> np.ndarray:
        """A tensor."""
        file, stored = self.names[name]
        return file.get_tensor(stored)


def load_params(
    checkpoint: Checkpoint, like: Any, rules: Rules, *, ignored: Sequence[str] = (), progress: bool = False
) -> Any:
    """Reads a checkpoint into the structure of `like`, one parameter after another, onto the device.

    Beside the parameters read so far, host memory holds one parameter and one tensor at a time.

    Args:
      checkpoint: the opened files.
      like: a tree of shapes and dtypes, as `nnx.split` of a module under `nnx.eval_shape` gives it.
      rules: how each parameter is made.
      ignored: patterns of whole names that may be there and are not needed.
      progress: show a progress bar.

    Raises:
      ValueError: tensors are missing, too many, of the wrong shape, or not floats; the message lists all.
    """
    leaves, structure = jax.tree.flatten(like)
    names = weights.names(like)
    assert set(names) == set(rules), sorted(set(names) ^ set(rules))
    chosen = {name: _chosen(rules[name], checkpoint) for name in names}
    faults = _faults(checkpoint, chosen, dict(zip(names, leaves, strict=True)), ignored)
    if faults:
        raise ValueError(f"{checkpoint.folder} does not fit its config: {'; '.join(faults)}.")
    steps = rich.progress.track(
        list(zip(names, leaves, strict=True)), description="Loading weights", disable=not progress
    )
    params = [jax.device_put(_build(checkpoint, chosen[name], leaf)) for name, leaf in steps]
    return jax.tree.unflatten(structure, params)


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map.")
        paths = [folder / name for name in sorted(set(weight_map.values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ValueError(f"{folder}: the index names files that are not there: {', '.join(missing)}.")
        return paths
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ValueError(f"{folder} has neither model.safetensors nor {INDEX}.")


def _joins(rule: Join | Stack) -> tuple[Join, ...]:
    return rule.parts if isinstance(rule, Stack) else (rule,)


def _chosen(rule: Rule, checkpoint: Checkpoint) -> Join | Stack:
    """The option whose tensors are there; if none is complete, the one of which most is."""
    if not isinstance(rule, OneOf):
        return rule

    def share(option: Join | Stack) -> float:
        wanted = [name for join in _joins(option) for name in join.names]
        return sum(name in checkpoint.names for name in wanted) / len(wanted)

    return max(rule.options, key=share)


def _faults(
    checkpoint: Checkpoint, chosen: dict[str, Join | Stack], leaves: dict[str, Any], ignored: Sequence[str]
) -> list[str]:
    used = {name for rule in chosen.values() for join in _joins(rule) for name in join.names}
    extra = [
        name
        for name in checkpoint.names.keys() - used
        if not any(re.fullmatch(pattern, name) for pattern in ignored)
    ]
    faults = [f"missing {name}" for name in sorted(used - checkpoint.names.keys())]
    faults += [f"unknown {name} {checkpoint.shape(name)}" for name in sorted(extra)]
    for name in sorted(used & checkpoint.names.keys()):
        if checkpoint.dtype(name) not in _FLOATS:
            faults.append(f"{name} is {checkpoint.dtype(name)}, not {', '.join(_FLOATS)}")
    for name, rule in chosen.items():
        joins, shape = _joins(rule), tuple(leaves[name].shape)
        if isinstance(rule, Stack) and len(joins) != shape[0]:
            faults.append(f"{name} has {shape[0]} experts here, and rules for {len(joins)}")
        for join in joins:
            there = [part for part in join.names if part in checkpoint.names]
            got = [checkpoint.shape(part) for part in there]
            want = shape[1:] if isinstance(rule, Stack) else shape
            if len(there) == len(join.names) and not _fits(join, got, want):
                parts = ", ".join(f"{part} {size}" for part, size in zip(there, got, strict=True))
                faults.append(f"{parts} cannot make {name} {want}")
    return faults


def _fits(join: Join, shapes: list[tuple[int, ...]], want: tuple[int, ...]) -> bool:
    """Whether the joined tensors have the parameter's shape; axes of length 1 do not count."""
    if join.transposed:
        want = (*want[:-2], want[-1], want[-2])
    if join.rows is not None:
        # The rows that are taken have the parameter's size; their tensors may have more, and other axes.
        columns = math.prod(shapes[0][1:])
        total = sum(shape[0] for shape in shapes)
        return (
            all(math.prod(shape[1:]) == columns for shape in shapes)
            and len(join.rows) * columns == math.prod(want)
            and int(join.rows.max()) < total
        )
    first, rest = sum(shape[0] for shape in shapes), {shape[1:] for shape in shapes}
    return len(rest) == 1 and _squeezed((first, *rest.pop())) == _squeezed(want)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _build(checkpoint: Checkpoint, rule: Join | Stack, leaf: Any) -> np.ndarray:
    out = np.empty(leaf.shape, leaf.dtype)
    parts = out if isinstance(rule, Stack) else out[None]
    for index, join in enumerate(_joins(rule)):
        _fill(parts[index, ...], checkpoint, join)
    return out


def _fill(target: np.ndarray, checkpoint: Checkpoint, join: Join) -> None:
    """Writes the joined tensors to `target`, in its dtype."""
    view = target.swapaxes(-1, -2) if join.transposed else target
    if join.rows is not None or len(join.names) == 1:
        parts = [checkpoint.read(name) for name in join.names]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        joined = joined if join.rows is None else joined[join.rows]
        view[...] = joined.reshape(view.shape)
        return
    start = 0
    for name in join.names:
        part = checkpoint.read(name)
        view[start : start + len(part)] = part.reshape(len(part), *view.shape[1:])
        start += len(part)
