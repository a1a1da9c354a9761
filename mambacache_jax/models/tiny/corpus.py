"""The training text: the running interpreter's standard library, in whole files."""

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

SEPARATOR = 0
"""The byte between documents; also the model's end token."""

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two disjoint sets of whole files, each file followed by `SEPARATOR`.

    Attributes:
      train: bytes to train on.
      held_out: bytes never trained on.
      num_train_files: files in `train`.
      num_held_out_files: files in `held_out`.
    """

    train: np.ndarray
    held_out: np.ndarray
    num_train_files: int
    num_held_out_files: int


def is_held_out(relative_path: str) -> bool:
    """Whether a file (path inside the library, with forward slashes) is held out: 1 in 20, by its name."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % 20 == 0


def read_corpus(root: Path | None = None) -> Corpus:
    """Reads every `.py` file outside test folders, in the order of their paths.

    Args:
      root: the library's folder; None: the running interpreter's.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(relative.parts):
            text = path.read_bytes().replace(b"\0", b"") + bytes([SEPARATOR])
            parts[is_held_out(relative.as_posix())].append(text)
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return Corpus(train, held_out, len(parts[0]), len(parts[1]))


def windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` windows of `length` bytes, `[count, length]` int32, spread evenly over the text."""
    if len(text) < length:
        raise ValueError(f"The text has {len(text)} bytes, fewer than one window of {length}.")
    starts = np.linspace(0, len(text) - length, count).astype(np.int64)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)
