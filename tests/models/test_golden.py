"""Checkpoints of every family give the logits and states that transformers computes from them in float64.

`golden/` holds tiny checkpoints and the reference, and says how both were made. Logits may be as far from
the reference as four times what transformers is in float32, or 2e-4: the sums are the same, their order is
not. (Random delta-rule layers amplify rounding at single rows.)
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mambacache_jax.config import AttentionSpec, CacheConfig, EngineConfig, SamplingParams
from mambacache_jax.engine import Engine
from mambacache_jax.models import PlainContext, load

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
LONG = [name for name in NAMES if np.load(GOLDEN / name / "golden.npz")["lengths"][0] == 150]
MARGIN = 2e-3
"""Two best logits nearer than this may change places: ten times what logits may be off."""


@pytest.fixture(scope="module", params=NAMES)
def whole(request):
    """The model, its reference, and its logits, K and V of the whole first sequence without pools."""
    model, arrays = load(GOLDEN / request.param), dict(np.load(GOLDEN / request.param / "golden.npz"))
    tokens = jnp.asarray(arrays["ids_0"])

    @jax.jit
    def forward(params, tokens):
        ctx = PlainContext(model.specs, 1, len(tokens))
        return model.logits(params, model.hidden(params, tokens, ctx)), ctx.kv

    return model, arrays, *forward(model.params, tokens)


@pytest.fixture(scope="module", params=LONG)
def engine(request):
    """An engine over the checkpoint, of one block a step, and the reference."""
    cache = CacheConfig(num_kv_slots=512, num_ssm_slots=24, track_interval=8)
    config = EngineConfig(
        max_running=1, max_context=256, token_budget=64, max_extend_rows=1, return_logits=True
    )
    arrays = dict(np.load(GOLDEN / request.param / "golden.npz"))
    return Engine(GOLDEN / request.param, cache, config), arrays


def bound(arrays, index=0):
    return max(4 * arrays["error"][index], 2e-4)


def check_logits(got, arrays, rows, index=0):
    np.testing.assert_allclose(got, arrays[f"logits_{index}"][rows], atol=bound(arrays, index), rtol=0)


def check_state(got, arrays, key):
    """Within four times float32's error in transformers, or four roundings of the largest value."""
    want = arrays[key]
    floor = 4 * np.finfo(np.float32).eps * np.abs(want).max()
    atol = max(4 * arrays[f"error_{key}"], floor)
    np.testing.assert_allclose(got, want, atol=atol, rtol=0, err_msg=key)


def kept(arrays):
    """What transformers keeps for each layer that keeps anything: `(is_attention, prefix of the keys)`."""
    layers = sorted({int(key.split("_")[1]) for key in arrays if key.startswith("state_")})
    pairs = [(kind == "k", f"state_{layer}") for layer in layers for kind in ("k", "rec")]
    return [(attention, key) for attention, key in pairs if f"{key}_{'k' if attention else 'rec'}" in arrays]


def test_whole_sequences_give_the_reference_logits(whole):
    model, arrays, logits, _ = whole
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"float32"}
    check_logits(logits, arrays, slice(None))


def test_keys_and_values_are_those_of_the_reference(whole):
    model, arrays, _, kv = whole
    length = arrays["lengths"][0]
    for layer, (attention, key) in enumerate(kept(arrays)):
        assert attention == isinstance(model.specs[layer], AttentionSpec)
        if attention:
            k, v = (np.asarray(x[:length]).transpose(1, 0, 2) for x in kv[layer])
            check_state(k, arrays, f"{key}_k")
            check_state(v, arrays, f"{key}_v")


def test_chunks_through_the_pools_give_the_reference_logits_and_states(engine):
    """150 tokens in steps of 64; then the states of the checkpoint at their end."""
    engine, arrays = engine
    engine.reset()
    for index, length in enumerate(arrays["lengths"]):
        got = engine.logits(arrays[f"ids_{index}"][:length])
        check_logits(got, arrays, slice(0, length), index)


def test_a_reused_prefix_and_single_tokens_give_the_reference_logits(engine):
    """A prompt is computed; longer ones go on from it; then one token at a time, each from a checkpoint."""
    engine, arrays = engine
    engine.reset()
    ids, length = arrays["ids_0"], 150
    engine.logits(ids[:100])
    before = engine.stats().computed_tokens
    check_logits(engine.logits(ids[:length], start=99), arrays, slice(99, length))
    for end in range(length + 1, len(ids) + 1):
        check_logits(engine.logits(ids[:end], start=end - 1), arrays, slice(end - 1, end))
    assert engine.stats().computed_tokens - before == (length - 99) + (len(ids) - length)


def test_greedy_tokens_are_those_of_the_reference(engine):
    """Decoding, up to the first token whose two best logits are within rounding."""
    engine, arrays = engine
    engine.reset()
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for index, length in enumerate(arrays["lengths"]):
        ids, margin = arrays[f"ids_{index}"], arrays[f"margin_{index}"]
        (out,) = engine.generate([ids[:length]], params)
        sure = int(np.argmax(margin < MARGIN)) if (margin < MARGIN).any() else len(margin)
        assert out.token_ids[:sure] == ids[length : length + sure].tolist()
        check_logits(out.logits[:sure], arrays, slice(length - 1, length - 1 + sure), index)
    engine.check_invariants()


def test_states_and_windows_after_a_prompt_are_those_of_the_reference(engine):
    """Read from the pools after prefill, in the slot that the request worked in."""
    engine, arrays = engine
    engine.reset()
    length = int(arrays["lengths"][0])
    engine.logits(arrays["ids_0"][:length])
    pool = engine.cache.pools.ssm
    slot = np.flatnonzero(np.asarray(pool.position) == length)[-1]
    recurrent = [key for attention, key in kept(arrays) if not attention]
    for key, conv, state in zip(recurrent, pool.conv, pool.state, strict=True):
        # transformers keeps as many inputs as the conv has taps; the oldest of them is never read again.
        check_state(
            np.asarray(conv[slot]).T, {**arrays, f"{key}_conv": arrays[f"{key}_conv"][:, 1:]}, f"{key}_conv"
        )
        axes = (0, 2, 1) if engine.model.specs[0].kind == "mamba2" else (0, 1, 2)
        check_state(np.asarray(state[slot]).transpose(axes), arrays, f"{key}_rec")
