"""What goes wrong where speculation meets recurrent states, by the letter of the list that collects it.

A the bonus token, B positions, C track points (`test_rounds`), D and E pending tokens of rows that end or
move, F mixed batches, G drafts of changing size, H bits (`test_rounds`), J padding, K full rejection, L
batches in changing order, Q equal siblings (`test_rounds`, `test_draft_tree`). Not here: I holds by JAX's
values, M is the engine's, N, O and P are about what this system does not have (drafts with recurrent
layers, penalties, several verdicts).
"""

import jax
import numpy as np
import pytest

from .rounds import KINDS, ROWS, START, TRACK, WORKING, Run, draft, plain_texts, speculate
from .test_rounds import assert_same_bits


def ended_alike(run):
    """A row's state after a fold is that of plain decoding up to all of its text but the last token."""
    run.fold()
    plain = Run().decode_to([len(text) for text in run.texts])
    plain.fold()
    for got, want in zip(run.state(), plain.state(), strict=True):
        assert_same_bits(got, want)


def test_a_stop_token_inside_a_run_ends_text_and_state_there():
    """Trap A: a stop token is emitted and not folded."""
    texts = plain_texts(0.0)
    stop = texts[0][3]
    run = Run(stops=(stop, -1))
    run.round([draft("right", text, 1, None) for text in texts])
    assert run.stopped[0]
    assert run.texts[0] == list(texts[0][: list(texts[0]).index(stop, 1) + 1])
    ended_alike(run)


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_a_length_limit_inside_a_run_ends_text_and_state_there(limit):
    run = Run(limit=limit)
    run.round([draft("right", text, 1, None) for text in plain_texts(0.0)])
    assert [len(text) for text in run.texts] == [limit] * ROWS
    assert all(run.stopped)
    ended_alike(run)


def test_a_stop_that_only_the_host_sees_shortens_what_is_pending():
    """Trap A, for stop strings: what is cut off has not been folded yet, so nothing has to be undone."""
    run = Run()
    run.round([draft("right", text, 1, None) for text in plain_texts(0.0)])
    run.shorten([2, 1, 9])
    run.texts = [text[:n] for text, n in zip(run.texts, (3, 2, 5), strict=True)]
    ended_alike(run)
    longer = Run()
    longer.round([draft("right", text, 1, None) for text in plain_texts(0.0)])
    longer.texts = run.texts
    with pytest.raises(AssertionError):
        ended_alike(longer)


def test_a_wrong_position_would_show():
    """Trap B: nodes of one depth share a position, so an accepted node writes K rotated by its depth."""
    run = Run()
    texts = plain_texts(0.0)
    # The right draft is node 5 of the tree and at depth 1.
    drafts = [([(t[1] + n) % 256 for n in (1, 2, 3, 4, 0)], [-1] * 5) for t in texts]
    run.round(drafts)
    assert run.accepted == [[2] * ROWS]
    ended_alike(run)


def test_a_row_that_gets_another_request_must_drop_what_is_pending():
    """Traps D and E."""

    def restarted(drop):
        run = speculate(Run(), ["right"], 2)
        if drop:
            run.shorten([9, 9, 0])
        run.texts[2] = Run().texts[2]
        return run

    run = restarted(drop=True)
    speculate(run, ["tree"], 3)
    assert run.texts[2] == list(plain_texts(0.0)[2][: len(run.texts[2])])
    stale = restarted(drop=False)
    with pytest.raises(AssertionError):
        speculate(stale, ["tree"], 3)


def test_what_is_pending_is_folded_once_however_often_it_is_asked_for():
    """Trap G: pending tokens are consumed by the program that folds them."""
    run = speculate(Run(), ["right"], 2)
    run.fold()
    before = run.state()
    run.fold()
    for got, want in zip(run.state(), before, strict=True):
        assert_same_bits(got, want)


def test_a_slot_is_at_its_stamp_before_the_fold_and_at_the_end_after():
    """Trap D: what is published, copied or kept is folded first, and the stamp tells if it was not."""
    run = speculate(Run(), ["right"], 2)
    stamps = np.asarray(run.pools.ssm.position)[list(WORKING)]
    pending = np.asarray(run.pending.length)[1:]
    assert (stamps + pending == [run.kv_len(r) for r in range(ROWS)]).all()
    assert (pending == 4).all()
    run.fold()
    assert np.asarray(run.pools.ssm.position)[list(WORKING)].tolist() == [run.kv_len(r) for r in range(ROWS)]


def test_rows_with_and_without_drafts_or_pending_run_together_or_sit_out():
    """Trap F: a round without drafts after an accepted one, rows that sit out with tokens pending."""
    run, texts, rng = Run(), plain_texts(0.0), np.random.default_rng(5)
    for n in range(12):
        live = tuple(bool(x) for x in rng.integers(0, 2, ROWS))
        kinds = rng.choice(["empty", "right", "tree", "wrong"], ROWS)
        run.round(
            [draft(kind, texts[r], len(run.texts[r]), rng) for r, kind in enumerate(kinds)],
            live,
        )
        if n == 5:
            run.fold(live=(True, False, True))
    assert all(run.texts[r] == list(texts[r][: len(run.texts[r])]) for r in range(ROWS))
    ended_alike(run)


def test_modes_may_change_from_round_to_round():
    run = Run()
    for mode in ("replay_exact", "snapshot", "one_layer", "snapshot", "replay_exact"):
        speculate(run, ["right", "tree", "late"], 1, mode=mode)
    assert all(run.texts[r] == list(plain_texts(0.0)[r][: len(run.texts[r])]) for r in range(ROWS))
    ended_alike(run)


@pytest.mark.parametrize("mode", ["replay_exact", "snapshot"])
def test_rows_that_sit_out_keep_every_bit(mode):
    """Trap J."""
    run = speculate(Run(mode=mode), KINDS, 2)
    before = jax.device_get((run.pools, run.pending))
    speculate(run, ["tree"], 2, live=(True, False, False))
    after = jax.device_get((run.pools, run.pending))
    idle = [*WORKING[1:], *TRACK[1:], 7]
    for a, b in zip(jax.tree.leaves(before[0].ssm), jax.tree.leaves(after[0].ssm), strict=True):
        assert a[idle].tobytes() == b[idle].tobytes()
    for a, b in zip(jax.tree.leaves(before[1]), jax.tree.leaves(after[1]), strict=True):
        assert a[2:].tobytes() == b[2:].tobytes()
    for a, b in zip(jax.tree.leaves(before[0].kv), jax.tree.leaves(after[0].kv), strict=True):
        for r in (1, 2):
            slots = (before[0].table.pages[r + 1][:6, None] * 4 + np.arange(4)).reshape(-1)
            assert a[slots].tobytes() == b[slots].tobytes()


def test_a_fully_rejected_first_round_commits_the_bonus_token_alone():
    """Trap K."""
    run = Run()
    run.round([draft("wrong", text, 1, None) for text in plain_texts(0.0)])
    assert run.accepted == [[1] * ROWS]
    assert [run.kv_len(r) for r in range(ROWS)] == [n + 1 for n in START]
    ended_alike(run)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_in_another_order_each_round_writes_the_same_texts(temperature):
    """Trap L: what a row accepted follows its request, not its place in the batch."""
    run, rng = Run(temperature=temperature), np.random.default_rng(2)
    for _ in range(6):
        speculate(run, ["tree", "right", "wrong"], 1, order=rng.permutation(ROWS))
    texts = plain_texts(temperature)
    assert all(run.texts[r] == list(texts[r][: len(run.texts[r])]) for r in range(ROWS))
