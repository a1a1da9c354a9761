"""Speculation writes the text of plain decoding and leaves its states, bit for bit where that is promised."""

import numpy as np
import pytest

from .rounds import INTERVAL, KINDS, MODES, ROWS, START, TRACK, Run, plain_texts, speculate


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_the_text_is_that_of_plain_decoding_whatever_is_drafted(mode, temperature):
    texts = plain_texts(temperature)
    for kind in KINDS:
        run = speculate(Run(mode=mode, temperature=temperature), [kind], 5)
        for r in range(ROWS):
            assert run.texts[r] == list(texts[r][: len(run.texts[r])]), (kind, r)
        lengths = np.array(run.accepted)
        if kind in ("right", "twins"):
            assert (lengths == 4).all()
        if kind in ("wrong", "empty"):
            assert (lengths == 1).all()
        if kind == "late":
            assert (lengths == 3).all()


@pytest.mark.parametrize("mode", ["replay_exact", "one_layer", "snapshot"])
def test_states_windows_and_kv_have_the_bits_of_plain_decoding(mode):
    run = speculate(Run(mode=mode), KINDS, 8)
    run.fold()
    plain = Run().decode_to([len(text) for text in run.texts])
    plain.fold()
    for got, want in zip(run.state(), plain.state(), strict=True):
        assert_same_bits(got, want)


def test_replay_in_parallel_leaves_the_states_of_plain_decoding_to_rounding():
    run = speculate(Run(mode="replay_parallel"), KINDS, 8)
    run.fold()
    plain = Run(mode="replay_parallel").decode_to([len(text) for text in run.texts])
    plain.fold()
    for got, want in zip(run.state(), plain.state(), strict=True):
        for a, b in zip(got, want, strict=True):
            scale = np.abs(b).max()
            # The folds are exact; what is folded comes from outputs in float32 that differ by rounding.
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("mode", MODES)
def test_a_track_point_inside_a_run_is_exported_at_its_place_on_the_path(mode):
    """Trap C: after each round and fold, the track slot holds the state of plain decoding at its stamp."""
    run, seen = Run(mode=mode), set()
    for n in range(7):
        before = run.kv_len(0)
        speculate(run, [("tree", "right", "late")[n % 3]], 1)
        run.fold()
        done = run.kv_len(0) // INTERVAL * INTERVAL
        stamps = np.asarray(run.pools.ssm.position)
        for r in range(ROWS):
            point = run.kv_len(r) // INTERVAL * INTERVAL
            assert stamps[TRACK[r]] == (point if point > START[r] else 0)
        if done > before:
            seen.add(done - before)
            plain = Run(mode=mode).decode_to([done - START[0] + 1, 1, 1])
            plain.fold()
            got, want = run.state(TRACK[:1])[0], plain.state((1,))[0]
            if mode == "replay_parallel":
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())
            else:
                assert_same_bits(got, want)
    assert len(seen) > 1, "track points must be met at more than one place of a run"
