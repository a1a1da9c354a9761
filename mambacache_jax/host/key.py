"""Tokens as bytes, and what names a prefix: its bytes in the tree, its length and hash in a stamp.

A run of tokens is kept as little-endian int32 bytes: two runs compare with one `startswith`, and a page's
bytes are the key of a child. The hash is CRC-32 of those bytes: it extends the hash of the tokens before, so
however a sequence is cut its hash is the same, and it notices any change that lies within one token. It
guards against mistakes, not against an adversary; the tree itself compares tokens.
"""

import operator
import zlib
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

TOKEN_BYTES = 4
EMPTY_HASH = 0
"""The hash of no tokens."""

_MAX_TOKEN = 2**31 - 1
_MARK_TOKENS = 1024
_INT32 = np.dtype("<i4")


class Stamp:
    """What a checkpoint is the state of: so many tokens, with this hash.

    A stamp that a `TokenBuffer` gives refers to the buffer, which is only ever appended to. It is hashed when
    it has to be compared with tokens that come from elsewhere, and never if they come from the same buffer.

    Attributes:
      position: tokens folded into the state.
    """

    __slots__ = ("_buffer", "_hash", "position")

    def __init__(
        self, position: int, token_hash: int | None = None, buffer: "TokenBuffer | None" = None
    ) -> None:
        """Makes a stamp from the hash of the tokens, or from a buffer that begins with them."""
        if (token_hash is None) == (buffer is None):
            raise ValueError("A stamp needs the hash of its tokens, or the buffer that they are in.")
        self.position, self._hash, self._buffer = position, token_hash, buffer

    @property
    def token_hash(self) -> int:
        """`path_hash` of the tokens."""
        if self._hash is None:
            assert self._buffer is not None, "a stamp has a hash or a buffer."
            self._hash = self._buffer.hash_at(self.position)
        return self._hash

    def is_of(self, tokens: "Tokens", position: int) -> bool:
        """Whether this is the stamp of the state after the first `position` of `tokens`."""
        if self.position != position:
            return False
        if self._buffer is not None and self._buffer is tokens:
            return True
        return self.token_hash == hash_at(tokens, position)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stamp):
            return NotImplemented
        return (self.position, self.token_hash) == (other.position, other.token_hash)

    def __hash__(self) -> int:
        return hash((self.position, self.token_hash))

    def __repr__(self) -> str:
        return f"Stamp(position={self.position}, token_hash={self.token_hash})"


def path_hash(data: bytes | bytearray | memoryview) -> int:
    """The hash of a prefix, given as `token_bytes`."""
    return zlib.crc32(data)


def extend_hash(token_hash: int, data: bytes | bytearray | memoryview) -> int:
    """The hash of a prefix and the tokens after it: `path_hash(a + b) == extend_hash(path_hash(a), b)`."""
    return zlib.crc32(data, token_hash)


class TokenBuffer:
    """The tokens of a growing request, only ever appended to, so that no turn converts its history again."""

    __slots__ = ("_data", "_marks", "_tail")

    def __init__(self, tokens: "Tokens" = ()) -> None:
        self._data = bytes(token_bytes(tokens))
        self._tail = bytearray()
        self._marks = [EMPTY_HASH]

    def __len__(self) -> int:
        return (len(self._data) + len(self._tail)) // TOKEN_BYTES

    @property
    def data(self) -> bytes:
        """The tokens as little-endian int32. What was appended is joined to them once, when they are read."""
        if self._tail:
            self._data += self._tail
            self._tail.clear()
        return self._data

    def append(self, token: SupportsIndex) -> None:
        """Adds one token."""
        value = operator.index(token)
        if not 0 <= value <= _MAX_TOKEN:
            raise ValueError(f"Tokens must be in [0, 2**31), got {value}.")
        self._tail += value.to_bytes(TOKEN_BYTES, "little")

    def extend(self, tokens: "Tokens") -> None:
        """Adds tokens; all or, where one is out of range, none."""
        self._tail += token_bytes(tokens)

    def array(self, start: int, end: int) -> np.ndarray:
        """A copy of tokens `[start, end)`, int32."""
        if not 0 <= start <= end <= len(self):
            raise ValueError(f"Tokens [{start}, {end}) asked of a buffer that holds {len(self)}.")
        return np.frombuffer(bytearray(self.data[TOKEN_BYTES * start : TOKEN_BYTES * end]), _INT32)

    def stamp(self, position: int) -> Stamp:
        """The stamp of the state after `position` tokens."""
        if not 0 <= position <= len(self):
            raise ValueError(f"Position {position} lies outside a buffer of {len(self)} tokens.")
        return Stamp(position, buffer=self)

    def hash_at(self, position: int) -> int:
        """The hash of the first `position` tokens.

        The hash after every 1,024 tokens is remembered, so that each token is hashed once, and then at most
        1,023 again for each call.
        """
        full, marks, width, data = (
            position // _MARK_TOKENS,
            self._marks,
            _MARK_TOKENS * TOKEN_BYTES,
            self.data,
        )
        for at in range(len(marks) - 1, full):
            marks.append(extend_hash(marks[at], data[at * width : (at + 1) * width]))
        return extend_hash(marks[full], data[full * width : TOKEN_BYTES * position])

    def common_prefix_len(self, other: "TokenBuffer") -> int:
        """Tokens from the start that both buffers share."""
        data = self.data
        return common_len(data, 0, len(data), other.data)


Tokens = TokenBuffer | np.ndarray | bytes | bytearray | memoryview | Sequence[int]
"""Tokens from position 0. `bytes` and `bytearray` hold little-endian int32; a list is slow, 10 ns a token.
A `TokenBuffer` is the fast way: it is converted and checked once."""


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as little-endian int32 bytes; a `TokenBuffer` and bytes give their own, without a copy.

    Raises:
      ValueError: a token is negative or beyond int32, or bytes are no whole int32 numbers.
    """
    if isinstance(tokens, TokenBuffer):
        return tokens.data
    if isinstance(tokens, bytes | bytearray):
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(tokens)} bytes are no whole number of int32 tokens.")
        return bytes(tokens)
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


def hash_at(tokens: Tokens, position: int) -> int:
    """The hash of the first `position` tokens; a `TokenBuffer` has most of it already."""
    if isinstance(tokens, TokenBuffer):
        return tokens.hash_at(position)
    return path_hash(token_bytes(tokens)[: TOKEN_BYTES * position])


def checked_bytes(tokens: Tokens) -> bytes:
    """`token_bytes`, with raw bytes looked through as well, which a tree must do before it keeps them."""
    data = token_bytes(tokens)
    if isinstance(tokens, bytes | bytearray) and data:
        token_bytes(np.frombuffer(data, _INT32))
    return data


def common_len(key: bytes, start: int, end: int, tokens: bytes) -> int:
    """Tokens that `key[start:end]` and `tokens` share from their start; all four in bytes but the result."""
    count = min(end - start, len(tokens)) // TOKEN_BYTES
    if not count:
        return 0
    differs = np.frombuffer(key, _INT32, count, start) != np.frombuffer(tokens, _INT32, count)
    first = int(differs.argmax())
    return first if differs[first] else count
