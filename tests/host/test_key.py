"""Tokens become the same bytes whatever they come in; a hash does not depend on how a sequence is cut."""

import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambacache_jax.host import Stamp, TokenBuffer, extend_hash, path_hash, token_bytes
from mambacache_jax.host.key import common_len

BYTES = b"\x01\x00\x00\x00\x00\x01\x00\x00\xff\xff\xff\x7f"
TOKENS = [1, 256, 2**31 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        np.array(TOKENS, np.int32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, np.uint32),
        np.array([0, 1, 0, 256, 0, 2**31 - 1], np.int32)[1::2],
        array.array("i", TOKENS),
        memoryview(array.array("i", TOKENS)),
        BYTES,
        bytearray(BYTES),
        TokenBuffer(TOKENS),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_become_little_endian_int32(tokens):
    assert bytes(token_bytes(tokens)) == BYTES


@pytest.mark.parametrize("tokens", [[], np.zeros(0, np.int32), b"", TokenBuffer()])
def test_no_tokens_are_no_bytes(tokens):
    assert token_bytes(tokens) == b""


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], "got -1"),
        (np.array([-1], np.int32), "got -1"),
        ([2**31], "got 2147483648"),
        (np.array([2**31], np.uint32), "got 2147483648"),
        ([1.0], "integers"),
        ([True], "integers"),
        ([[1]], "one-dimensional"),
        (b"abc", "3 bytes"),
    ],
)
def test_what_is_no_token_is_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        token_bytes(tokens)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_the_hash_of_two_parts_is_the_hash_of_the_whole(first, second):
    assert extend_hash(path_hash(first), second) == path_hash(first + second)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8), st.data())
def test_any_change_of_one_token_changes_the_hash(tokens, data):
    index = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**31 - 1).filter(lambda token: token != tokens[index]))
    changed = [*tokens[:index], other, *tokens[index + 1 :]]
    assert path_hash(token_bytes(tokens)) != path_hash(token_bytes(changed))


def test_leading_zeros_count():
    assert len({path_hash(token_bytes([0] * length)) for length in range(4)}) == 4


def test_a_buffer_grows_and_reads_back():
    buffer = TokenBuffer([1, 2])
    buffer.append(3)
    buffer.append(np.int32(4))
    buffer.extend(np.array([5, 6], np.int32))
    buffer.extend(buffer)
    assert len(buffer) == 12
    assert buffer.array(0, 12).tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]
    assert buffer.array(2, 4).tolist() == [3, 4]
    assert buffer.array(12, 12).tolist() == []
    assert buffer.array(0, 2).dtype == np.int32


def test_an_array_taken_from_a_buffer_is_a_copy():
    buffer = TokenBuffer([1, 2])
    taken = buffer.array(0, 2)
    taken[:] = 9
    buffer.append(3)
    assert buffer.array(0, 3).tolist() == [1, 2, 3]


def test_a_buffer_is_matched_without_a_copy():
    buffer = TokenBuffer([1, 2])
    assert token_bytes(buffer) is buffer.data


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_buffer_refuses_what_is_no_token_and_keeps_its_own(token):
    buffer = TokenBuffer([1])
    with pytest.raises(ValueError, match=r"\[0, 2\*\*31\)"):
        buffer.append(token)
    with pytest.raises(ValueError, match=r"\[0, 2\*\*31\)"):
        buffer.extend([2, token])
    assert buffer.array(0, len(buffer)).tolist() == [1]


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (2, 1), (0, 4)])
def test_a_buffer_refuses_ranges_that_it_does_not_hold(start, end):
    with pytest.raises(ValueError, match="holds 3"):
        TokenBuffer([1, 2, 3]).array(start, end)


@pytest.mark.parametrize("position", [0, 1, 5, 1023, 1024, 1025, 2048, 4999, 5000])
def test_a_stamp_is_the_position_and_the_hash_of_the_tokens_before_it(position):
    tokens = np.arange(5000, dtype=np.int32)
    expected = Stamp(position, path_hash(tokens[:position].tobytes()))
    assert TokenBuffer(tokens).stamp(position) == expected


def test_stamps_may_be_asked_in_any_order_while_the_buffer_grows():
    tokens, buffer = list(range(3000)), TokenBuffer()
    for token in tokens:
        buffer.append(token)
        if token % 701 == 0:
            for position in (len(buffer), 0, len(buffer) // 2):
                assert buffer.stamp(position).token_hash == path_hash(token_bytes(tokens[:position]))


def test_a_stamp_outside_the_buffer_is_refused():
    for position in (-1, 3):
        with pytest.raises(ValueError, match="buffer of 2 tokens"):
            TokenBuffer([1, 2]).stamp(position)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_buffers_know_how_far_they_agree(first, second):
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert TokenBuffer(first).common_prefix_len(TokenBuffer(second)) == expected
    padded = token_bytes([7, *first, 7])
    assert common_len(padded, 4, 4 + 4 * len(first), bytes(token_bytes(second))) == expected
