"""A trace file is read as it is written, and what its prompts share follows from their block ids."""

import gzip
import json

import pytest

from mambacache_jax.bench import trace as traces
from mambacache_jax.bench.trace import Request, Trace

HEADER = {"format": "hybrid-trace-1", "block_size": 4, "source": "here"}


def request(input_length, ids, session_id=-1, output_length=1):
    return Request(0, session_id, input_length, output_length, tuple(ids))


def a_trace(*requests):
    return Trace(4, requests, HEADER)


def write_lines(path, *lines):
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))


def test_runs_expand_to_one_id_a_block(tmp_path):
    row = {
        "timestamp": 7,
        "session_id": 2,
        "input_length": 9,
        "output_length": 4,
        "runs": [[5, 2], [9, 1], [0, 1]],
    }
    write_lines(tmp_path / "t.gz", HEADER, row)
    (read,) = traces.read_trace(tmp_path / "t.gz").requests
    assert read == Request(7, 2, 9, 4, (5, 6, 9, 0))
    assert read.prompt_blocks(4) == (5, 6, 9)


def test_a_written_trace_reads_back_equal_and_is_the_same_bytes_every_time(tmp_path):
    trace = a_trace(request(9, [5, 6, 9, 10], 2, 4), request(3, [5]))
    for name in ("a.gz", "b.gz"):
        traces.write_trace(trace, tmp_path / name)
    assert traces.read_trace(tmp_path / "a.gz") == trace
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"format": "other"}], "does not say format"),
        ([["a", "list"]], "does not say format"),
        ([{"format": "hybrid-trace-1"}], "lacks a field"),
        ([HEADER, {"timestamp": 0}], "lacks a field"),
        (
            [
                HEADER,
                {"timestamp": 0, "session_id": 0, "input_length": 9, "output_length": 1, "runs": [[0, 2]]},
            ],
            "request 0: 2 block ids of 4 tokens do not cover 10 tokens",
        ),
    ],
)
def test_what_is_not_a_trace_is_refused_by_name(tmp_path, lines, message):
    write_lines(tmp_path / "t.gz", *lines)
    with pytest.raises(ValueError, match=rf"t\.gz.*{message}"):
        traces.read_trace(tmp_path / "t.gz")


@pytest.mark.parametrize(
    "content", [b"", b"plain text", gzip.compress(b"not json"), gzip.compress(b"{}")[:-4]]
)
def test_a_broken_file_is_a_value_error(tmp_path, content):
    (tmp_path / "t.gz").write_bytes(content)
    with pytest.raises(ValueError, match="is not a trace"):
        traces.read_trace(tmp_path / "t.gz")


@pytest.mark.parametrize(
    ("first", "second", "tokens"),
    [
        (request(10, [0, 1, 2]), request(11, [0, 1, 3]), 8),
        (request(10, [0, 1, 2]), request(11, [0, 1, 2]), 10),
        (request(5, [0, 1]), request(20, [0, 1, 2, 3, 4, 5]), 5),
        (request(5, [0, 1]), request(5, [7, 1]), 0),
    ],
)
def test_prompts_share_their_common_blocks_up_to_the_shorter_end(first, second, tokens):
    assert traces.shared_tokens(first, second, 4) == traces.shared_tokens(second, first, 4) == tokens


def test_what_was_seen_before_is_the_longest_prefix_shared_with_an_earlier_prompt():
    trace = a_trace(
        request(6, [0, 1]),
        request(10, [0, 1, 2]),  # the first prompt's 6 tokens
        request(9, [0, 1, 2]),  # all of it
        request(9, [0, 3, 4]),  # one block
        request(3, [8]),
    )
    assert traces.seen_before(trace) == [0, 6, 9, 4, 0]


def test_an_answer_is_not_a_prompt_that_was_seen():
    trace = a_trace(request(4, [0, 1], output_length=4), request(8, [0, 1, 2]))
    assert traces.seen_before(trace) == [0, 4]


def test_warmed_prefixes_count_as_seen():
    trace = a_trace(request(6, [0, 1]), request(10, [0, 1, 2]))
    assert traces.seen_before(trace, warm=[(1, 8)]) == [6, 8]


def test_the_bundled_sample_agrees_with_a_plain_search_of_what_was_seen():
    trace = traces.sample()
    plain = [
        max((traces.shared_tokens(r, earlier, trace.block_size) for earlier in trace.requests[:i]), default=0)
        for i, r in enumerate(trace.requests)
    ]
    assert traces.seen_before(trace) == plain


def test_common_prefixes_are_the_longest_that_enough_conversations_begin_with():
    trace = a_trace(
        request(12, [0, 1, 2], session_id=0),
        request(12, [0, 1, 3], session_id=1),
        request(12, [0, 1, 3], session_id=1),  # the same conversation again counts once
        request(12, [0, 4, 5], session_id=2),
        request(12, [7, 8, 9], session_id=3),
        request(7, [7, 8], session_id=4),  # shares no more than one full block
    )
    assert traces.common_prefixes(trace, min_sessions=2, min_tokens=1) == [(0, 8), (4, 4)]
    assert traces.common_prefixes(trace, min_sessions=3, min_tokens=1) == [(0, 4)]
    assert traces.common_prefixes(trace, min_sessions=2, min_tokens=5) == [(0, 8)]


def test_the_sample_says_where_it_comes_from_and_holds_what_its_header_says():
    trace = traces.sample()
    assert trace.header["licence"] == ["Apache-2.0"]
    assert len(trace.header["source"]) == 2
    assert trace.header["requests"] == len(trace.requests)
    assert trace.header["sessions"] == len({r.session_id for r in trace.requests})
    cut = trace.header["cut"]
    assert all(r.input_length <= cut["longest"] for r in trace.requests)
    assert all(cut["shortest_answer"] <= r.output_length <= cut["longest_answer"] for r in trace.requests)
