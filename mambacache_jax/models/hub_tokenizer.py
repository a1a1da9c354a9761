"""The tokenizer of a checkpoint folder, through the `tokenizers` library."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32

from mambacache_jax.models.chat import ChatTemplate
from mambacache_jax.models.checkpoint.settings import read_config
from mambacache_jax.models.tokenizer import TokenIds

FILE = "tokenizer.json"


class HubTokenizer:
    """`tokenizer.json`, and the chat template where the folder has one.

    Attributes:
      chat_template: turns messages into the text of a prompt; None: the folder has none.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the folder's files.

        Raises:
          ValueError: `tokenizer_config.json` is not a JSON object, or the template does not parse.
        """
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / FILE))
        path = folder / "tokenizer_config.json"
        config = read_config(path) if path.is_file() else {}
        source = _template(folder, config)
        self.chat_template = None if source is None else ChatTemplate(source, _special_tokens(config))

    def encode(self, text: str, *, special_tokens: bool = True) -> Int32[np.ndarray, " token"]:
        """The ids of a text; `special_tokens` adds those that begin and end a text of this model."""
        ids = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return np.asarray(ids, np.int32)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **variables: Any
    ) -> Int32[np.ndarray, " token"]:
        """The ids of a conversation up to where the model answers.

        Args:
          messages: mappings with `role` and `content`, as the template knows them.
          **variables: what else the template may read, such as `tools`.

        Raises:
          ValueError: the folder has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("The checkpoint has no chat template: give a text, or token ids.")
        # The template writes special tokens itself.
        return self.encode(self.chat_template.render(messages, **variables), special_tokens=False)

    def decode(self, ids: TokenIds) -> str:
        """The text of ids, without special tokens; what is not valid text becomes U+FFFD."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def stream(self) -> "HubStream":
        """A decoder for one text."""
        return HubStream(self.decode)


class HubStream:
    """Tokens to whole characters.

    A token's text depends on the tokens before it (a space at the start of a text, a character of several
    tokens), so it is what the text of a few tokens more ends in.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Starts with no tokens."""
        self._decode = decode
        self._before: list[int] = []
        self._new: list[int] = []

    def push(self, ids: TokenIds) -> str:
        """Takes the next tokens; returns the whole characters that they complete."""
        self._new.extend(int(token) for token in ids)
        text = self._text()
        # A character whose last bytes are still to come reads as U+FFFD.
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes U+FFFD."""
        return self._show(self._text())

    def _text(self) -> str:
        return self._decode(self._before + self._new)[len(self._decode(self._before)) :]

    def _show(self, text: str) -> str:
        if self._new:
            self._before, self._new = self._new, []
        return text


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The source of the chat template, from its own file or from the tokenizer's config."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and kin, which a config writes as text or as an object with `content`."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
