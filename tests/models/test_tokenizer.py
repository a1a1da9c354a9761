"""Bytes are the tokens, and a stream shows whole characters only, whatever the pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mambacache_jax.models import ByteTokenizer, TextStream, Tokenizer

TOKENIZER = ByteTokenizer()


def pieces(ids, cuts):
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_it_is_what_the_engine_asks_for():
    assert isinstance(TOKENIZER, Tokenizer)
    assert isinstance(TOKENIZER.stream(), TextStream)


def test_ids_are_the_bytes_of_utf_8():
    ids = TOKENIZER.encode("aé\0")
    assert ids.dtype == np.int32
    assert ids.tolist() == [97, 0xC3, 0xA9, 0]
    assert TOKENIZER.decode(ids) == "aé\0"


def test_a_character_appears_with_its_last_byte():
    stream = TOKENIZER.stream()
    assert [stream.push([byte]) for byte in "é€🙂".encode()] == ["", "é", "", "", "€", "", "", "", "🙂"]
    assert stream.flush() == ""


def test_bytes_that_are_no_text_become_replacement_characters():
    assert TOKENIZER.decode([0xFF, 97, 0xC3]) == "\ufffda\ufffd"
    stream = TOKENIZER.stream()
    assert stream.push([0xFF]) == "\ufffd"
    assert stream.push([97, 0xC3]) == "a"
    assert stream.flush() == "\ufffd"


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=30), cuts=st.lists(st.integers(0, 30)))
def test_any_pieces_of_any_bytes_add_up_to_the_whole_text(ids, cuts):
    stream = TOKENIZER.stream()
    text = "".join([stream.push(piece) for piece in pieces(ids, cuts)]) + stream.flush()
    assert text == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 80)))
def test_what_has_been_shown_is_always_a_beginning_of_the_text(text, cuts):
    ids, stream, shown = TOKENIZER.encode(text).tolist(), TOKENIZER.stream(), ""
    for piece in pieces(ids, cuts):
        shown += stream.push(piece)
        assert text.startswith(shown)
    assert shown == text
    assert stream.flush() == ""


def test_an_id_outside_the_bytes_is_refused():
    with pytest.raises(ValueError, match="256"):
        TOKENIZER.decode([3, 256])
