"""Tokens as bytes, and what names a prefix: its bytes in the tree, its length and hash in a stamp.

A run of tokens is kept as little-endian int32 bytes: two runs compare with one `startswith`, and a page's
bytes are the key of a child. The hash is CRC-32 of those bytes: it extends the hash of the tokens before, so
however a sequence is cut its hash is the same, and it notices any change that lies within one token. It
guards against mistakes, not against an adversary; the tree itself compares tokens.
"""

import operator
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np

TOKEN_BYTES = 4
EMPTY_HASH = 0
"""The hash of no tokens."""

_MAX_TOKEN = 2**31 - 1
_MARK_TOKENS = 1024
_INT32 = np.dtype("<i4")


class Stamp(NamedTuple):
    """What a checkpoint is the state of: so many tokens, with this hash.

    Attributes:
      position: tokens folded into the state.
      token_hash: their `path_hash`.
    """

    position: int
    token_hash: int


def path_hash(data: bytes | bytearray | memoryview) -> int:
    """The hash of a prefix, given as `token_bytes`."""
    return zlib.crc32(data)


def extend_hash(token_hash: int, data: bytes | bytearray | memoryview) -> int:
    """The hash of a prefix and the tokens after it: `path_hash(a + b) == extend_hash(path_hash(a), b)`."""
    return zlib.crc32(data, token_hash)


class TokenBuffer:
    """The tokens of a growing request, only ever appended to, so that no turn converts its history again.

    It also remembers the hashes of prefixes that it was asked for, and of every 1,024 tokens on the way to
    them, so that a stamp hashes what is new and little more.
    """

    __slots__ = ("_at", "_data", "_hashes")

    def __init__(self, tokens: "Tokens" = ()) -> None:
        self._data = bytearray(token_bytes(tokens))
        self._at, self._hashes = [0], [EMPTY_HASH]

    def __len__(self) -> int:
        return len(self._data) // TOKEN_BYTES

    @property
    def data(self) -> bytearray:
        """The tokens as little-endian int32: the buffer itself, to read and never to change."""
        return self._data

    def append(self, token: SupportsIndex) -> None:
        """Adds one token."""
        value = operator.index(token)
        if not 0 <= value <= _MAX_TOKEN:
            raise ValueError(f"Tokens must be in [0, 2**31), got {value}.")
        self._data += value.to_bytes(TOKEN_BYTES, "little")

    def extend(self, tokens: "Tokens") -> None:
        """Adds tokens; all or, where one is out of range, none."""
        self._data += bytes(token_bytes(tokens))

    def array(self, start: int, end: int) -> np.ndarray:
        """A copy of tokens `[start, end)`, int32."""
        if not 0 <= start <= end <= len(self):
            raise ValueError(f"Tokens [{start}, {end}) asked of a buffer that holds {len(self)}.")
        return np.frombuffer(self._data[TOKEN_BYTES * start : TOKEN_BYTES * end], _INT32)

    def resume(self, stamp: Stamp) -> None:
        """Takes over the hash of a prefix from the checkpoint that a match found there.

        What is folded into that checkpoint's state is what its stamp says, so later stamps go on from it,
        and the matched part is never hashed again.
        """
        self._remember(stamp.position, stamp.token_hash)

    def stamp(self, position: int) -> Stamp:
        """The stamp of the state after `position` tokens."""
        if not 0 <= position <= len(self):
            raise ValueError(f"Position {position} lies outside a buffer of {len(self)} tokens.")
        index = bisect_right(self._at, position) - 1
        at, token_hash = self._at[index], self._hashes[index]
        if at == position:
            return Stamp(position, token_hash)
        with memoryview(self._data) as view:
            while at < position:
                end = min(position, at - at % _MARK_TOKENS + _MARK_TOKENS)
                token_hash = extend_hash(token_hash, view[TOKEN_BYTES * at : TOKEN_BYTES * end])
                at = end
                self._remember(at, token_hash)
        return Stamp(position, token_hash)

    def common_prefix_len(self, other: "TokenBuffer") -> int:
        """Tokens from the start that both buffers share."""
        return common_len(self._data, 0, len(self._data), other._data)

    def _remember(self, position: int, token_hash: int) -> None:
        if position > self._at[-1]:
            self._at.append(position)
            self._hashes.append(token_hash)
        elif self._at[index := bisect_left(self._at, position)] != position:
            self._at.insert(index, position)
            self._hashes.insert(index, token_hash)


Tokens = TokenBuffer | np.ndarray | bytes | bytearray | memoryview | Sequence[int]
"""Tokens from position 0. `bytes` and `bytearray` hold little-endian int32; a list is slow, 10 ns a token.
A `TokenBuffer` is the fast way: it is converted and checked once."""


def token_bytes(tokens: Tokens) -> bytes | bytearray:
    """Tokens as little-endian int32 bytes; a `TokenBuffer` gives its own buffer, without a copy.

    Raises:
      ValueError: a token is negative or beyond int32, or bytes are no whole int32 numbers.
    """
    if isinstance(tokens, TokenBuffer):
        return tokens.data
    if isinstance(tokens, bytes | bytearray):
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(tokens)} bytes are no whole number of int32 tokens.")
        return tokens
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"Tokens must be one-dimensional, got shape {array.shape}.")
    if not array.size:
        return b""
    if array.dtype.kind not in "iu":
        raise ValueError(f"Tokens must be integers in [0, 2**31), got {array.dtype}.")
    if (low := int(array.min())) < 0:
        raise ValueError(f"Tokens must be in [0, 2**31), got {low}.")
    if array.dtype.itemsize >= TOKEN_BYTES and (high := int(array.max())) > _MAX_TOKEN:
        raise ValueError(f"Tokens must be in [0, 2**31), got {high}.")
    return array.astype(_INT32, copy=False).tobytes()


def checked_bytes(tokens: Tokens) -> bytes | bytearray:
    """`token_bytes`, with raw bytes looked through as well, which a tree must do before it keeps them."""
    data = token_bytes(tokens)
    if isinstance(tokens, bytes | bytearray) and data:
        token_bytes(np.frombuffer(data, _INT32))
    return data


def common_len(key: bytes | bytearray, start: int, end: int, tokens: bytes | bytearray) -> int:
    """Tokens that `key[start:end]` and `tokens` share from their start; all four in bytes but the result."""
    count = min(end - start, len(tokens)) // TOKEN_BYTES
    if not count:
        return 0
    differs = np.frombuffer(key, _INT32, count, start) != np.frombuffer(tokens, _INT32, count)
    first = int(differs.argmax())
    return first if differs[first] else count
