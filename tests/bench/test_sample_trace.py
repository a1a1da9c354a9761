"""A cut sample keeps what prompts share, shrunk by its factor, whatever the source's block size."""

import dataclasses

import click.testing
import pytest

from mambacache_jax.bench import sample_trace
from mambacache_jax.bench.sample_trace import Cut, sample_of
from mambacache_jax.bench.trace import Request, Trace, read_trace, shared_tokens, write_trace

CUT = Cut(scale=16, block_size=4, longest=100, requests=10, min_turns=2, max_turns=3)


def source(block_size, *rows):
    requests = tuple(
        Request(i * 10, session, size, out, tuple(ids)) for i, (session, size, out, ids) in enumerate(rows)
    )
    return Trace(block_size, requests, {"source": "here", "licence": "Free", "cut": "none"})


AGENT = source(
    64,
    (5, 640, 64, [*range(11)]),
    (6, 320, 64, [0, 1, *range(20, 24)]),
    (5, 800, 160, [*range(15)]),
    (6, 640, 320, [0, 1, *range(20, 33)]),
    (7, 640, 64, [*range(90, 101)]),  # one turn only
)
CHAT = source(512, (-1, 1024, 512, [0, 1, 2]), (-1, 1536, 32, [0, 1, 2, 3]), (-1, 600, 100, [0, 9]))


def test_two_prompts_share_what_they_shared_in_the_source_divided_by_the_scale():
    cut = sample_of([AGENT], CUT)
    assert [r.input_length for r in cut.requests] == [40, 20, 50, 40]
    assert shared_tokens(cut.requests[0], cut.requests[2], 4) == 40
    assert shared_tokens(cut.requests[0], cut.requests[1], 4) == 2 * 64 // 16
    assert shared_tokens(cut.requests[1], cut.requests[3], 4) == 20


def test_larger_blocks_of_a_source_split_into_blocks_of_the_sample():
    cut = sample_of([CHAT], CUT)
    assert [r.input_length for r in cut.requests] == [64, 96]
    assert shared_tokens(*cut.requests, 4) == 64
    assert len(cut.requests[1].block_ids) == -(-(96 + 4) // 4)


def test_sources_share_nothing_and_interleave():
    cut = sample_of([AGENT, CHAT], CUT)
    chat = [r for r in cut.requests if r.input_length in (64, 96)]
    assert len(chat) == 2
    assert all(shared_tokens(r, other, 4) == 0 for r in chat for other in cut.requests if other not in chat)
    assert [r.timestamp for r in cut.requests] == sorted(r.timestamp for r in cut.requests)
    assert {r.timestamp for r in chat} == {0, sample_trace.SPAN_MS}


def test_answers_are_scaled_and_held_between_two_lengths():
    assert [r.output_length for r in sample_of([AGENT], CUT).requests] == [4, 4, 10, 20]


def test_a_conversation_ends_before_its_first_long_prompt_and_is_left_out_when_too_short():
    short = Cut(scale=16, block_size=4, longest=45, requests=10, min_turns=2, max_turns=3)
    assert [r.input_length for r in sample_of([AGENT], short).requests] == [20, 40]


def test_an_answer_raised_past_the_sources_last_block_gets_blocks_of_its_own():
    (first, second) = sample_of([source(64, (0, 64, 1, [0, 1]), (0, 64, 1, [0, 2]))], CUT).requests
    assert (first.input_length, first.output_length) == (4, 4)
    assert first.block_ids[:1] == second.block_ids[:1]
    assert len({*first.block_ids, *second.block_ids}) == 3


def test_blocks_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="does not split"):
        sample_of([source(48, (0, 64, 1, [0, 1]), (0, 64, 1, [0, 1]))], CUT)


def test_a_source_without_a_long_enough_conversation_is_refused():
    with pytest.raises(ValueError, match="here: no conversation has 9 turns of at most 1600 tokens"):
        sample_of([AGENT], dataclasses.replace(CUT, min_turns=9))


def test_the_command_writes_a_trace_file(tmp_path):
    turns = [(0, 640 + 64 * turn, 64, [*range(11 + turn)]) for turn in range(4)]
    write_trace(source(64, *turns), tmp_path / "source.gz")
    args = [str(tmp_path / "source.gz"), "--out", str(tmp_path / "out.gz"), "--requests", "4"]
    result = click.testing.CliRunner().invoke(sample_trace.main, args)
    assert result.exit_code == 0, result.output
    assert read_trace(tmp_path / "out.gz").header["source"] == ["here"]
