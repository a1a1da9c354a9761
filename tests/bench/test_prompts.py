"""Two prompts of a trace begin with the same text exactly as far as their block ids are the same."""

import itertools

import pytest

from mambacache_jax.bench import prompts, trace
from mambacache_jax.bench.trace import Request, Trace


def requests(*blocks):
    return Trace(4, tuple(Request(0, -1, 4 * len(ids), 1, (*ids, 99)) for ids in blocks), {})


def test_prompts_of_the_bundled_sample_share_exactly_what_their_ids_share():
    sample = trace.sample()
    texts = prompts.text_prompts(sample)
    assert [len(text) for text in texts] == [r.input_length for r in sample.requests]
    pairs = zip(texts, sample.requests, strict=True)
    for (text, request), (other_text, other) in itertools.combinations(pairs, 2):
        shared = trace.shared_tokens(request, other, sample.block_size)
        assert text[:shared] == other_text[:shared]
        assert shared in (len(text), len(other_text)) or text[shared] != other_text[shared]


def test_prompts_are_the_same_every_time():
    sample = trace.sample().head(40)
    assert prompts.text_prompts(sample) == prompts.text_prompts(sample)


def test_every_block_is_a_stretch_of_the_text_and_an_only_child_goes_on_in_it():
    text = "import os\nimport sys\ndef main():\n    return 1\n" * 4
    (prompt,) = prompts.text_prompts(requests([0, 1, 2]), text)
    assert prompt in text


def test_siblings_start_with_different_characters():
    text = "abcdefgh\n" * 20
    texts = prompts.text_prompts(requests([0, 1], [0, 2], [0, 3]), text)
    assert len({t[:4] for t in texts}) == 1
    assert len({t[4] for t in texts}) == 3


def test_more_siblings_than_characters_are_refused():
    with pytest.raises(ValueError, match="every character"):
        prompts.text_prompts(requests(*[[0, i] for i in range(1, 4)]), "ab" * 20)


def test_ids_that_are_not_chained_are_refused():
    with pytest.raises(ValueError, match="Request 1: block 2 follows block 1 here and 0 earlier"):
        prompts.text_prompts(requests([0, 2], [0, 1, 2]))


def test_the_text_is_ascii_source_code():
    assert prompts.corpus().isascii()
    assert "\ndef " in prompts.corpus()
