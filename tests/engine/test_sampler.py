"""Sampling follows the parameters, and depends on a row's own logits, seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mambacache_jax.engine.sampler import sample
from mambacache_jax.host.plan import pack_sampling

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
draw = jax.jit(sample)


def tokens(count, logits=LOGITS, *, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=7):
    """What one request would draw at positions 0 to `count - 1`."""
    fields = np.tile(pack_sampling(temperature, top_p, min_p, top_k, seed), (count, 1))
    rows = np.tile(logits, (count, 1))
    return np.asarray(draw(rows, fields, np.arange(count, dtype=np.int32)))


def test_temperature_zero_takes_the_best_token_and_the_lowest_id_among_equals():
    assert set(tokens(8, temperature=0.0)) == {1}
    assert set(tokens(8, np.zeros(5, np.float32), temperature=0.0)) == {0}


def test_frequencies_follow_the_probabilities():
    counts = np.bincount(tokens(20000), minlength=5) / 20000
    # Three standard deviations of a share of 0.4 over 20,000 draws are 0.0104.
    np.testing.assert_allclose(counts, np.exp(LOGITS), atol=0.011)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.86}, {0, 1, 3, 4}),
        ({"min_p": 0.45}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "min_p": 0.6}, {1, 3}),
        ({"top_k": 1000}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_keep_exactly_the_tokens_they_name(params, kept):
    assert set(tokens(3000, **params)) == kept


def test_a_low_temperature_approaches_the_best_token():
    assert set(tokens(200, temperature=0.02)) == {1}


def test_another_seed_draws_other_tokens_and_the_same_seed_the_same():
    assert (tokens(64, seed=1) == tokens(64, seed=1)).all()
    assert (tokens(64, seed=1) != tokens(64, seed=2)).any()


def test_a_rows_choice_does_not_depend_on_its_batch():
    alone = tokens(16)
    fields = np.stack([pack_sampling(0.0, 1.0, 0.0, 0, 3), pack_sampling(1.0, 1.0, 0.0, 0, 7)] * 16)
    rows = np.tile(LOGITS, (32, 1))
    positions = np.repeat(np.arange(16, dtype=np.int32), 2)
    batched = np.asarray(sample(jnp.asarray(rows), jnp.asarray(fields), jnp.asarray(positions)))
    assert (batched[1::2] == alone).all()
    assert (batched[0::2] == 1).all()
