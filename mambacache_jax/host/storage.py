"""The shape of a cache in a file: which prefixes it has and in which slots, for a warm start or a bug report.

The file is NumPy's `.npz`: a JSON header, and for each shard one row a node, parents first.
"""

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from mambacache_jax.config import CacheConfig
from mambacache_jax.host.key import TOKEN_BYTES
from mambacache_jax.host.namespace import AnyNamespace, Namespace, check_namespace
from mambacache_jax.host.node import Node
from mambacache_jax.host.tree import RadixTree

if TYPE_CHECKING:
    from mambacache_jax.host.shard import Shard

FORMAT = "mambacache-tree-1"

# What reading a damaged archive can raise, at any of its layers.
_DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    OSError,
    MemoryError,
    OverflowError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
_COLUMNS = ("parent", "namespace", "count", "slot", "stamp", "rank")


class Saved(NamedTuple):
    """What a file holds.

    Attributes:
      config: of the cache that was saved.
      namespaces: by number.
      shards: of each, int64 columns by name, and int32 "tokens" and "kv_slots" of all nodes in a row.
    """

    config: CacheConfig
    namespaces: list[AnyNamespace]
    shards: list[dict[str, np.ndarray]]


def save(path: str | Path, config: CacheConfig, trees: Sequence[RadixTree]) -> None:
    """Writes trees to a file, which appears whole or not at all."""
    namespaces: dict[AnyNamespace, int] = {}
    arrays: dict[str, np.ndarray] = {}
    for shard, tree in enumerate(trees):
        nodes = list(tree.nodes())
        number = {node: index for index, node in enumerate(nodes)}
        rank = {node: index for index, node in enumerate(tree.checkpoints, 1)}
        rows = [
            (
                -1 if node.parent is None or node.parent.parent is None else number[node.parent],
                namespaces.setdefault(node.root.namespace, len(namespaces)),
                len(node.kv) // TOKEN_BYTES,
                node.checkpoint_slot,
                node.stamp,
                rank.get(node, 0),
            )
            for node in nodes
        ]
        columns = np.array(rows, np.int64).reshape(len(rows), len(_COLUMNS))
        arrays |= {f"{shard}/{name}": columns[:, at] for at, name in enumerate(_COLUMNS)}
        arrays[f"{shard}/tokens"] = np.frombuffer(b"".join(node.tokens for node in nodes), "<i4")
        arrays[f"{shard}/kv_slots"] = np.frombuffer(b"".join(node.kv for node in nodes), np.int32)
    header = {
        "format": FORMAT,
        "config": dataclasses.asdict(config),
        "namespaces": [_to_json(namespace) for namespace in namespaces],
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read(path: str | Path) -> Saved:
    """Reads a file.

    Raises:
      ValueError: it was not written by `save`, or is damaged.
    """
    # Where it raises, NumPy leaves a file open that it opened itself.
    with Path(path).open("rb") as stream:
        try:
            return _read(stream)
        except _DAMAGE as error:
            raise ValueError(f"{path} holds no saved prefix cache: {error}.") from error


def _read(stream: BinaryIO) -> Saved:
    with np.load(stream, allow_pickle=False) as file:
        header = json.loads(file["header"].tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {FORMAT!r}")
        config = CacheConfig(**header["config"])
        namespaces = [_from_json(value) for value in header["namespaces"]]
        names = (*_COLUMNS, "tokens", "kv_slots")
        shards = [{n: file[f"{shard}/{n}"] for n in names} for shard in range(config.num_shards)]
    for namespace in namespaces:
        check_namespace(namespace)
    for name, column in ((name, column) for columns in shards for name, column in columns.items()):
        if column.dtype.kind != "i" or column.ndim != 1:
            raise ValueError(f"its {name} are {column.dtype} of shape {column.shape}")
    return Saved(config, namespaces, shards)


def restore(saved: Saved, shards: Sequence["Shard"]) -> None:
    """Builds saved trees in shards that are empty.

    Raises:
      ValueError: pages or shards differ, a slot is outside the pools or not free, or the file contradicts
        itself.
    """
    if len(shards) != len(saved.shards):
        raise ValueError(f"{len(saved.shards)} shards were saved, and the cache has {len(shards)}.")
    for shard, columns in zip(shards, saved.shards, strict=True):
        if shard.kv.page_size != saved.config.page_size:
            raise ValueError(
                f"Pages of {saved.config.page_size} tokens were saved, and the cache has pages of "
                f"{shard.kv.page_size}."
            )
        try:
            nodes = _build(shard, saved.namespaces, columns)
            shard.tree.check_invariants()
        except (AssertionError, IndexError, KeyError) as error:
            raise ValueError(f"The saved tree contradicts itself: {error}") from error
        shard.kv.claim(columns["kv_slots"])
        shard.ssm.claim(columns["slot"][columns["slot"] != 0])
        if shard.log is not None:
            for node in nodes:
                shard.log.stored(node)
                if node.checkpoint_slot:
                    shard.log.checkpoint_stored(node)


def _build(shard: "Shard", namespaces: list[AnyNamespace], columns: dict[str, np.ndarray]) -> list[Node]:
    tree, nodes = shard.tree, []
    rows = {len(columns[name]) for name in _COLUMNS}
    assert len(rows) == 1, f"its columns have {sorted(rows)} rows."
    ends = np.cumsum(columns["count"])
    tokens = columns["tokens"].astype("<i4").tobytes()
    kv_slots = shard.kv.as_int32(columns["kv_slots"])
    total = int(ends[-1]) if len(ends) else 0
    assert len(tokens) == total * TOKEN_BYTES, f"{total} tokens are needed, {len(tokens)} bytes are there."
    assert len(kv_slots) == total, f"{total} KV slots are needed, {len(kv_slots)} are there."
    assert not total or columns["tokens"].min() >= 0, "a token is negative."
    table = zip(*(columns[name].tolist() for name in _COLUMNS), ends.tolist(), strict=True)
    for parent, namespace, count, slot, _, _, end in table:
        assert count > 0, "a node has no tokens."
        assert -1 <= parent < len(nodes), "a node comes before its parent."
        root = tree.root(namespaces[namespace], shard.counts_of(namespaces[namespace], True))
        above = root if parent < 0 else nodes[parent]
        assert above.root is root, "a node has another namespace than its parent."
        run = tokens[(end - count) * TOKEN_BYTES : end * TOKEN_BYTES]
        node = tree.add_leaf(above, run, kv_slots[end - count : end].tobytes())
        nodes.append(node)
        if slot:
            tree.set_checkpoint(node, slot)
    tree.reorder(nodes, columns["stamp"].tolist(), columns["rank"].tolist())
    return nodes


def _to_json(namespace: AnyNamespace) -> dict[str, Any]:
    if isinstance(namespace, Namespace):
        return {"Namespace": namespace._asdict()}
    if isinstance(namespace, bytes):
        return {"bytes": namespace.hex()}
    return {"plain": namespace}


def _from_json(value: dict[str, Any]) -> AnyNamespace:
    if "Namespace" in value:
        return Namespace(**value["Namespace"])
    return bytes.fromhex(value["bytes"]) if "bytes" in value else value["plain"]
