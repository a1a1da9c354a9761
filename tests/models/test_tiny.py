"""The built-in model is what its record says, causal, and the same in chunks as token by token."""

import importlib.resources

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mambacache_jax.config import AttentionSpec
from mambacache_jax.models import PlainContext, load, tiny, weights
from mambacache_jax.models.tiny.corpus import read_corpus, windows
from mambacache_jax.models.tiny.evaluate import DRAFTS, agreement, losses

ROWS, LENGTH = 8, 500


@pytest.fixture(scope="module")
def model():
    return load("tiny")


@pytest.fixture(scope="module")
def text():
    return windows(read_corpus().held_out, ROWS, LENGTH + DRAFTS + 1)


@pytest.fixture(scope="module")
def run(model):
    """Logits of the model and both drafts for a text; the hidden vectors, K and V that drafts start from."""

    @jax.jit
    def forward(params, text):
        ctx = PlainContext(model.specs, ROWS, LENGTH)
        hidden = [model.hidden(params, text[:, :LENGTH].reshape(-1), ctx)]
        for step in range(1, DRAFTS + 1):
            tokens = text[:, step : step + LENGTH].reshape(-1)
            hidden.append(
                model.mtp_step(
                    params, tokens, hidden[-1], ctx.positions, lambda q, s: ctx.read(model.mtp_layer, q, s)
                )
            )
        logits = [model.logits(params, h).reshape(ROWS, LENGTH, -1) for h in hidden]
        return logits, hidden[0].reshape(ROWS, LENGTH, -1), ctx.kv[model.mtp_layer]

    return lambda text: forward(model.params, jnp.asarray(text))


@pytest.fixture(scope="module")
def out(run, text):
    return run(text)


def test_it_has_every_kind_of_layer_and_the_promised_size(model):
    kinds = {"attention" if isinstance(spec, AttentionSpec) else spec.kind for spec in model.specs}
    assert kinds == {"attention", "mamba2", "gdn", "kda"}
    assert 1_000_000 <= model.num_params <= 2_000_000
    assert model.num_params == tiny.record()["parameters"]
    assert model.vocab_size == 256
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model.params))


def test_the_weights_are_small_and_those_of_the_record():
    weights = importlib.resources.files("mambacache_jax.models.tiny") / "tiny.safetensors"
    size = len(weights.read_bytes())
    assert size <= 5_000_000
    assert size == tiny.record()["file_bytes"]


def test_the_record_says_that_training_succeeded():
    record = tiny.record()
    assert record["bits_per_byte"] < 1.9
    assert record["held_out_files"] > 0


def test_held_out_text_costs_less_than_the_promised_bits(out, text):
    """On eight windows only, hence of another interpreter's files perhaps, so with some slack."""
    bits = np.asarray(losses(out[0], jnp.asarray(text)))
    assert bits[0] < 1.9 + 0.2
    assert bits[0] < bits[1] < bits[2] < 3.0
    assert agreement(out[0]).min() > 0.6


def test_chunks_give_the_logits_of_the_loop_over_tokens(model, out, text):
    @jax.jit
    def forward(params, tokens):
        ctx = PlainContext(model.specs, 2, LENGTH, implementation="reference")
        return model.logits(params, model.hidden(params, tokens, ctx))

    want = forward(model.params, jnp.asarray(text[:2, :LENGTH].reshape(-1)))
    np.testing.assert_allclose(out[0][0][:2].reshape(-1, 256), want, atol=1e-4)


def test_a_later_token_changes_no_earlier_logits(run, out, text):
    at = 301
    changed = text.copy()
    changed[:, at] = (changed[:, at] + 1) % 256
    after = run(changed)
    for step in range(DRAFTS + 1):
        # A draft step has seen `step` tokens more.
        first = at - step
        assert np.array_equal(out[0][step][:, :first], after[0][step][:, :first])
        assert not np.allclose(out[0][step][:, first], after[0][step][:, first], atol=1e-3)


def test_rows_do_not_see_each_other(run, out, text):
    changed = text.copy()
    changed[0] = changed[0][::-1]
    after = run(changed)
    np.testing.assert_allclose(out[0][0][1:], after[0][0][1:], atol=1e-5)


def test_drafts_row_by_row_are_those_of_whole_sequences(model, out, text):
    """Two unrolled steps at one position a row, K and V read by a function of the caller's."""
    logits, hidden, (k, v) = out
    at = np.array([5, 64, 499], np.int32)
    k, v = (np.asarray(x).reshape(ROWS, LENGTH, *x.shape[1:]) for x in (k, v))

    def attend(q, scale):
        out = np.zeros(q.shape, np.float32)
        for row, t in enumerate(at):
            keys, values = (np.repeat(x[row, : t + 1], q.shape[1] // x.shape[2], axis=1) for x in (k, v))
            scores = np.einsum("hd,thd->ht", np.asarray(q[row]), keys) * scale
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            out[row] = np.einsum("ht,thd->hd", weight / weight.sum(-1, keepdims=True), values)
        return jnp.asarray(out)

    rows, state = np.arange(3), hidden[np.arange(3), at]
    for step in range(1, DRAFTS + 1):
        tokens = jnp.asarray(text[rows, at + step])
        state = model.mtp_step(model.params, tokens, state, jnp.asarray(at), attend)
        got = model.logits(model.params, state)
        np.testing.assert_allclose(got, np.asarray(logits[step])[rows, at], atol=1e-3)


def test_an_unknown_model_is_a_clear_error():
    with pytest.raises(ValueError, match=r"'nope'.*'tiny'"):
        load("nope")


def test_a_folder_of_the_training_script_loads_like_the_built_in_model(model, tmp_path):
    weights.save(tmp_path / "tiny.safetensors", model.params, dtype="bfloat16")
    loaded = load(tmp_path)
    chex.assert_trees_all_equal(loaded.params, model.params)
    assert loaded.specs == model.specs
