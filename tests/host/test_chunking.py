"""Exports fall on page boundaries inside the chunk, the most useful first, and what is dropped is counted."""

import pytest

from mambacache_jax.host.chunking import export_positions, num_blocks, num_pages, page_floor


def positions(start, end, branches=(), prompt_len=100, interval=0, page_size=1):
    return export_positions(
        start, end, branches=branches, prompt_len=prompt_len, interval=interval, page_size=page_size
    )


def test_the_prompts_end_minus_one_is_exported_so_that_the_same_prompt_hits():
    assert positions(0, 100) == ([99], 0)


def test_a_chunk_that_ends_before_exports_nothing():
    assert positions(0, 64) == ([], 0)


def test_a_position_where_the_chunk_starts_is_not_exported_again():
    assert positions(99, 100) == ([], 0)


def test_the_branch_comes_first_and_results_ascend():
    assert positions(0, 100, branches=[40]) == ([40, 99], 0)


def test_the_furthest_branch_comes_first_and_the_prompts_end_before_the_others():
    assert positions(0, 100, branches=[1, 40, 2]) == ([40, 99], 2)
    assert positions(0, 64, branches=[1, 40, 2, 80]) == ([2, 40], 1)


def test_more_than_two_exports_keep_branch_and_prompt_end_and_count_the_rest():
    assert positions(0, 100, branches=[40], interval=64) == ([40, 99], 1)


def test_the_interval_gives_the_chunks_last_multiple():
    assert positions(0, 150, prompt_len=400, interval=64) == ([128], 0)


@pytest.mark.parametrize(("prompt_len", "expected"), [(100, [96]), (97, [96]), (96, [92]), (4, []), (5, [4])])
def test_positions_are_rounded_down_to_a_page(prompt_len, expected):
    assert positions(0, prompt_len, prompt_len=prompt_len, page_size=4) == (expected, 0)


def test_equal_wishes_are_one_export():
    assert positions(0, 129, branches=[128], prompt_len=129, interval=64) == ([128], 0)


def test_a_prompt_of_one_token_has_nothing_to_export():
    assert positions(0, 1, prompt_len=1) == ([], 0)


def test_page_and_block_counts():
    assert [num_pages(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [num_blocks(n, 64) for n in (1, 64, 65)] == [1, 1, 2]
    assert [page_floor(n, 4) for n in (0, 3, 4, 7)] == [0, 0, 4, 4]
