"""Cuts the bundled trace sample from whole traces.

    python -m mambacache_jax.bench.sample_trace SOURCE... --out FILE

Lengths shrink by one factor, so that a prompt fits a small model, and block ids are split or kept so that a
block of the sample is the same stretch of the same prompt: what two prompts share shrinks by that factor too.
"""

import dataclasses
import itertools
from pathlib import Path

import click

from mambacache_jax.bench.trace import Request, Trace, read_trace, renumbered, write_trace

SPAN_MS = 1_800_000
"""All sources' arrivals are stretched to this time, so that their conversations interleave."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """What is taken from each source, and how it shrinks.

    Attributes:
      scale: tokens of the source for one of the sample.
      block_size: tokens of a block of the sample; divides `source block / scale`.
      longest: longest prompt of the sample; a conversation ends before the first longer one.
      shortest_answer: answers are scaled too, then held between these.
      longest_answer: see `shortest_answer`.
      requests: about how many requests each source gives; the last conversation is kept whole.
      min_turns: conversations with fewer turns are left out.
      max_turns: turns taken of a conversation.
    """

    scale: int = 16
    block_size: int = 4
    longest: int = 2000
    shortest_answer: int = 4
    longest_answer: int = 24
    requests: int = 140
    min_turns: int = 4
    max_turns: int = 12


def conversations(trace: Trace, cut: Cut) -> list[list[Request]]:
    """The eligible conversations, those first whose first block most of them share.

    A request without a session belongs with those that share its first two blocks.
    """
    turns: dict[tuple[str, int], list[Request]] = {}
    for request in trace.requests:
        if request.session_id >= 0:
            turns.setdefault(("session", request.session_id), []).append(request)
        elif request.input_length >= 2 * trace.block_size:
            turns.setdefault(("blocks", request.block_ids[1]), []).append(request)

    def fits(request: Request) -> bool:
        return request.input_length <= cut.longest * cut.scale

    heads = [list(itertools.takewhile(fits, rows))[: cut.max_turns] for rows in turns.values()]
    eligible = [rows for rows in heads if len(rows) >= cut.min_turns]
    family: dict[int, int] = {}
    for rows in eligible:
        family[rows[0].block_ids[0]] = family.get(rows[0].block_ids[0], 0) + 1
    eligible.sort(key=lambda rows: -family[rows[0].block_ids[0]])
    return eligible


def shrink(request: Request, source: Trace, cut: Cut, session_id: int, first_id: int) -> Request:
    """One request in the sample's tokens and block ids, which start at `first_id`."""
    parts, rest = divmod(source.block_size, cut.scale * cut.block_size)
    if rest or not parts:
        raise ValueError(
            f"A block of {source.block_size} tokens does not split into blocks of "
            f"{cut.block_size} x {cut.scale} tokens."
        )
    input_length = max(1, request.input_length // cut.scale)
    output_length = min(max(request.output_length // cut.scale, cut.shortest_answer), cut.longest_answer)
    ids = [first_id + block * parts + part for block in request.block_ids for part in range(parts)]
    # An answer raised to the shortest can pass the source's last block, which no later request shares.
    missing = -(-(input_length + output_length) // cut.block_size) - len(ids)
    ids += [-1 - len(ids) - k for k in range(missing)]
    return Request(
        timestamp=request.timestamp,
        session_id=session_id,
        input_length=input_length,
        output_length=output_length,
        block_ids=tuple(ids[: -(-(input_length + output_length) // cut.block_size)]),
    )


def sample_of(sources: list[Trace], cut: Cut) -> Trace:
    """The sample: conversations of every source, in order of their stretched arrival times."""
    rows: list[Request] = []
    first_id = sessions = 0
    for source in sources:
        taken: list[Request] = []
        for turns in conversations(source, cut):
            if len(taken) >= cut.requests:
                break
            taken += [shrink(turn, source, cut, sessions, first_id) for turn in turns]
            sessions += 1
        if not taken:
            raise ValueError(
                f"{source.header['source']}: no conversation has {cut.min_turns} turns of at most "
                f"{cut.longest * cut.scale} tokens."
            )
        rows += _stretched(taken)
        first_id += (1 + max(max(r.block_ids) for r in source.requests)) * source.block_size
    rows.sort(key=lambda row: row.timestamp)
    header = {
        "requests": len(rows),
        "sessions": sessions,
        "source": [source.header["source"] for source in sources],
        "licence": sorted({source.header["licence"] for source in sources}),
        "cut": {**dataclasses.asdict(cut), "sources": [source.header["cut"] for source in sources]},
        "note": (
            "Tokens are bytes: lengths are the source's divided by scale, answers then held between the two "
            "limits. Conversations whose first block most others share come first, each cut before its first "
            "prompt over longest. Arrivals of all sources are stretched to the same time. Ids and sessions "
            "are renumbered."
        ),
    }
    return Trace(cut.block_size, tuple(renumbered(rows)), header)


def _stretched(rows: list[Request]) -> list[Request]:
    start = min(row.timestamp for row in rows)
    span = max(1, max(row.timestamp for row in rows) - start)
    return [dataclasses.replace(row, timestamp=(row.timestamp - start) * SPAN_MS // span) for row in rows]


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The sample's file.")
@click.option("--requests", default=Cut.requests, show_default=True, help="About how many from each source.")
def main(sources: tuple[Path, ...], out: Path, requests: int) -> None:
    """Cuts a sample from whole trace files."""
    sample = sample_of([read_trace(path) for path in sources], Cut(requests=requests))
    write_trace(sample, out)
    click.echo(f"{out}: {len(sample.requests)} requests, {sample.header['sessions']} conversations")


if __name__ == "__main__":
    main()
