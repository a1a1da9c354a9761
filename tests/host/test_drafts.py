"""Look-up drafts are what followed the same tokens before."""

import numpy as np
import pytest

from mambacache_jax.host.drafts import HostDraft, NgramDraft


def proposed(text, draft=None, max_nodes=7, max_depth=3):
    draft = draft or NgramDraft()
    assert isinstance(draft, HostDraft)
    tokens, parent = draft.propose(
        np.frombuffer(text.encode(), np.uint8).astype(np.int32), max_nodes, max_depth
    )
    assert tokens.dtype == parent.dtype == np.int32
    return bytes(tokens.tolist()).decode(), parent.tolist()


def test_the_latest_occurrence_of_the_longest_match_goes_on():
    assert proposed("abcX abcY zbcW abc") == ("Y z", [-1, 0, 1])
    assert proposed("abcX abcY zbcW abc", NgramDraft(runs=3)) == ("Y zX aW", [-1, 0, 1, -1, 3, 4, -1])


def test_a_shorter_match_serves_where_there_is_no_longer_one():
    assert proposed("q bcX abc") == ("X a", [-1, 0, 1])
    assert proposed("q bcX abc", NgramDraft(longest=4, shortest=3)) == ("", [])


def test_runs_share_beginnings_and_stay_within_the_limits():
    assert proposed("abXY abXZ ab", NgramDraft(runs=2), max_depth=2) == ("XZY", [-1, 0, 0])
    assert proposed("abXY abXZ ab", NgramDraft(runs=2), max_nodes=2) == ("XZ", [-1, 0])


def test_a_run_may_overlap_what_it_is_matched_with():
    assert proposed("aaaa", NgramDraft(longest=2, shortest=1)) == ("a", [-1])


@pytest.mark.parametrize("text", ["", "a", "ab", "abc"])
def test_short_or_new_texts_have_no_drafts(text):
    assert proposed(text) == ("", [])


def test_nothing_is_drafted_where_nothing_fits():
    assert proposed("abab", max_nodes=0) == ("", [])
    assert proposed("abab", max_depth=0) == ("", [])


@pytest.mark.parametrize("fields", [{"shortest": 0}, {"longest": 1}, {"runs": 0}])
def test_impossible_limits_are_refused(fields):
    with pytest.raises(ValueError, match="NgramDraft needs"):
        NgramDraft(**fields)
