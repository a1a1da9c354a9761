"""Request traces: real traffic reduced to lengths and block ids, and what its prompts share.

A trace file is gzip JSON lines. The first line is the header; each further line is one request, in order of
arrival, whose `runs` `[[first, count], ...]` expand to one id for each block of `block_size` tokens of the
prompt and its answer. Ids are chained: two requests have the same id at index i exactly when their first
`(i + 1) * block_size` tokens are the same.
"""

import dataclasses
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FORMAT = "hybrid-trace-1"


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
      timestamp: arrival, milliseconds from the start of the trace.
      session_id: its conversation, -1 where the source does not say.
      input_length: tokens of the prompt.
      output_length: tokens of the answer, at least 1.
      block_ids: one id for each block of the prompt and its answer, the last of which may be part-filled.
    """

    timestamp: int
    session_id: int
    input_length: int
    output_length: int
    block_ids: tuple[int, ...]

    def prompt_blocks(self, block_size: int) -> tuple[int, ...]:
        """The ids that cover the prompt; the last block may be part-filled."""
        return self.block_ids[: -(-self.input_length // block_size)]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace file.

    Attributes:
      block_size: tokens of a block.
      requests: in order of arrival.
      header: the file's first line: its source, licence and how it was cut.
    """

    block_size: int
    requests: tuple[Request, ...]
    header: dict[str, Any]

    def head(self, count: int) -> "Trace":
        """The same trace with its first `count` requests."""
        return dataclasses.replace(self, requests=self.requests[:count])


def read_trace(path: str | Path) -> Trace:
    """Reads a trace file.

    Raises:
      ValueError: the file is not a trace, or a request's ids do not cover its tokens.
      OSError: the file cannot be read.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            header, *rows = [json.loads(line) for line in file]
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not a trace (gzip JSON lines with a header): {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a trace: its first line does not say format {FORMAT!r}.")
    try:
        block_size = int(header["block_size"])
        requests = tuple(_request(row, block_size, f"{path}, request {i}") for i, row in enumerate(rows))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a line lacks a field or holds another type: {error!r}") from error
    return Trace(block_size, requests, header)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes a trace file; the same trace always gives the same bytes."""
    lines = [json.dumps({**trace.header, "format": FORMAT, "block_size": trace.block_size})]
    for request in trace.requests:
        row = dataclasses.asdict(request)
        row["runs"] = _runs(row.pop("block_ids"))
        lines.append(json.dumps(row, separators=(",", ":")))
    Path(path).write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))


def sample() -> Trace:
    """The trace that is bundled with the package; its header says where it comes from."""
    return read_trace(Path(__file__).with_name("data") / "trace_sample.jsonl.gz")


def shared_tokens(first: Request, second: Request, block_size: int) -> int:
    """Tokens of the longest common prefix of two prompts."""
    blocks = 0
    for one, other in zip(first.block_ids, second.block_ids, strict=False):
        if one != other:
            break
        blocks += 1
    return min(blocks * block_size, first.input_length, second.input_length)


def seen_before(trace: Trace, warm: Sequence[tuple[int, int]] = ()) -> list[int]:
    """For each request, how many tokens of its prompt begin the prompt of an earlier request.

    Args:
      trace: its requests, in order.
      warm: (request index, length) of prefixes that count as seen from the start.
    """
    reach: dict[
        int, int
    ] = {}  # block id -> tokens, from position 0, of an earlier prompt that reaches into it
    seen = []

    def note(blocks: Sequence[int], length: int) -> None:
        for index, block in enumerate(blocks):
            reach[block] = max(reach.get(block, 0), min((index + 1) * trace.block_size, length))

    for index, length in warm:
        note(trace.requests[index].block_ids[: -(-length // trace.block_size)], length)
    for request in trace.requests:
        blocks = request.prompt_blocks(trace.block_size)
        seen.append(max((min(reach[b], request.input_length) for b in blocks if b in reach), default=0))
        note(blocks, request.input_length)
    return seen


def common_prefixes(trace: Trace, min_sessions: int, min_tokens: int) -> list[tuple[int, int]]:
    """The prefixes that many conversations begin with: system prompts and tool definitions.

    Args:
      trace: requests without a session count as one session each.
      min_sessions: conversations that must share the prefix.
      min_tokens: shorter prefixes are left out.

    Returns:
      (request index, prefix length) of each such prefix that is not part of a longer one, in trace order.
    """
    sessions: dict[int, set[int]] = {}
    for index, request in enumerate(trace.requests):
        for block in request.block_ids[: request.input_length // trace.block_size]:
            sessions.setdefault(block, set()).add(
                request.session_id if request.session_id >= 0 else -1 - index
            )
    found: dict[int, tuple[int, int]] = {}  # the prefix's last block -> where it stands
    inner: set[int] = set()
    for index, request in enumerate(trace.requests):
        full = request.block_ids[: request.input_length // trace.block_size]
        common = [block for block in full if len(sessions[block]) >= min_sessions]
        if len(common) * trace.block_size >= min_tokens:
            found.setdefault(common[-1], (index, len(common) * trace.block_size))
            inner.update(common[:-1])
    return [place for block, place in found.items() if block not in inner]


def _request(row: dict[str, Any], block_size: int, where: str) -> Request:
    ids = tuple(first + k for first, count in row["runs"] for k in range(count))
    tokens = row["input_length"] + row["output_length"]
    if len(ids) != -(-tokens // block_size):
        raise ValueError(
            f"{where}: {len(ids)} block ids of {block_size} tokens do not cover {tokens} tokens."
        )
    return Request(row["timestamp"], row["session_id"], row["input_length"], row["output_length"], ids)


def _runs(ids: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for block in ids:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return runs


def renumbered(requests: Iterable[Request]) -> list[Request]:
    """The same requests with ids and sessions numbered in order of first appearance."""
    ids: dict[int, int] = {}
    sessions: dict[int, int] = {}
    return [
        dataclasses.replace(
            request,
            session_id=sessions.setdefault(request.session_id, len(sessions))
            if request.session_id >= 0
            else -1,
            block_ids=tuple(ids.setdefault(block, len(ids)) for block in request.block_ids),
        )
        for request in requests
    ]
