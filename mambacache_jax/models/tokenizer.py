"""Text to token ids and back; streaming never shows part of a character."""

import codecs
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer

TokenIds = Iterable[int] | Integer[np.ndarray, " token"]


@runtime_checkable
class TextStream(Protocol):
    """Decodes the tokens of one text as they come."""

    def push(self, ids: TokenIds) -> str:
        """Takes the next tokens; returns the whole characters that they complete."""
        ...

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes U+FFFD."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> Int32[np.ndarray, " token"]:
        """The ids of a text."""
        ...

    def decode(self, ids: TokenIds) -> str:
        """The text of ids; what is not valid text becomes U+FFFD."""
        ...

    def stream(self) -> TextStream:
        """A decoder for one text; what it gives in all is `decode` of all ids."""
        ...


class ByteTokenizer:
    """One id a byte of UTF-8.

    Id 0 separates documents in training and ends an answer; a NUL character in a text is the same id.
    """

    vocab_size = 256
    end_token_id = 0

    def encode(self, text: str) -> Int32[np.ndarray, " token"]:
        """The bytes of the text; an unpaired surrogate is a `UnicodeEncodeError`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: TokenIds) -> str:
        """The text of the bytes; each run that is not UTF-8 becomes U+FFFD."""
        return _as_bytes(ids).decode("utf-8", errors="replace")

    def stream(self) -> "ByteStream":
        """A decoder for one text."""
        return ByteStream()


class ByteStream:
    """Bytes to whole characters; holds at most three bytes back."""

    def __init__(self) -> None:
        """Starts with nothing held back."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: TokenIds) -> str:
        """Takes the next bytes; returns the whole characters that they complete."""
        return self._decoder.decode(_as_bytes(ids))

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class NoTokenizer:
    """Stands for the tokenizer of a checkpoint that has none: prompts must be token ids, text stays empty."""

    def __init__(self, name: str) -> None:
        """Remembers the model's name, for errors."""
        self._name = name

    def encode(self, text: str) -> Int32[np.ndarray, " token"]:
        """Raises ValueError: there is no way to encode a text."""
        raise ValueError(f"{self._name} has no tokenizer.json: give prompts as token ids, not as text.")

    def decode(self, ids: TokenIds) -> str:
        """The empty text."""
        return ""

    def stream(self) -> "NoText":
        """A decoder that shows nothing."""
        return NoText()


class NoText:
    """Takes tokens and shows no text."""

    def push(self, ids: TokenIds) -> str:
        """The empty text."""
        return ""

    def flush(self) -> str:
        """The empty text."""
        return ""


def _as_bytes(ids: TokenIds) -> bytes:
    values = [int(token) for token in ids]
    if bad := [value for value in values if not 0 <= value < 256]:
        raise ValueError(f"ByteTokenizer: ids lie in [0, 256), got {bad[0]}.")
    return bytes(values)
