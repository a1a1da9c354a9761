"""Real text for a trace's prompts: they share exactly the prefixes that their block ids share.

The text is ASCII source code of the running interpreter's standard library, one token a character. A block
goes on where its parent's text ended; where prompts part, each further block starts at another place whose
first character none of its siblings starts with, so that two prompts differ from the first token on that
their ids do not share.
"""

import functools
import re
import sysconfig
from pathlib import Path

from mambacache_jax.bench.trace import Trace


@functools.cache
def corpus() -> str:
    """The top modules of the standard library in one string, ASCII files only, by name."""
    texts = [p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    return b"\n".join(text for text in texts if text.isascii()).decode("ascii")


def text_prompts(trace: Trace, text: str | None = None) -> list[str]:
    """The prompts of a trace, one character a token.

    Args:
      trace: its ids are chained, as in every trace file.
      text: where the blocks are cut from; by default `corpus()`.

    Raises:
      ValueError: an id stands under two prefixes, or more prompts part at one place than the text has
        characters.
    """
    text = corpus() if text is None else text
    size = trace.block_size
    start: dict[int, int] = {}  # block id -> where its text starts
    parent: dict[int, int] = {}
    used: dict[int, str] = {-1: ""}  # block id, -1 before the first -> first characters of its children
    prompts = []
    for index, request in enumerate(trace.requests):
        before, goes_on = -1, None
        parts = []
        for block in request.prompt_blocks(size):
            if block not in start:
                start[block] = _place(text, size, used[before], goes_on, block)
                parent[block] = before
                used[before] += text[start[block]]
                used[block] = ""
            elif parent[block] != before:
                raise ValueError(
                    f"Request {index}: block {block} follows block {before} here and {parent[block]} earlier."
                )
            parts.append(text[start[block] : start[block] + size])
            before, goes_on = block, start[block] + size
        prompts.append("".join(parts)[: request.input_length])
    return prompts


def _place(text: str, size: int, taken: str, goes_on: int | None, block: int) -> int:
    """Where a new block starts: at `goes_on` if it may, else at a line, else anywhere."""
    end = len(text) - size
    if goes_on is not None and goes_on <= end and text[goes_on] not in taken:
        return goes_on
    # An odd multiple of the id, modulo the text: blocks of one parent start far from each other.
    offset = block * 2654435761 % (end + 1)
    first = f"[^{re.escape(taken)}]" if taken else r"[\s\S]"
    for pattern in (re.compile(rf"(?<=\n)(?!\n){first}"), re.compile(first)):
        found = pattern.search(text, offset, end) or pattern.search(text, 0, end)
        if found:
            return found.start()
    raise ValueError(f"Block {block}: its siblings start with every character of the text.")
