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
# One checkpoint of each family goes through an engine; the other shapes of a family through whole sequences.
POOLED = ("bamba", "falcon_h1", "granite_moe", "kimi_linear", "nemotron_h", "qwen3_5", "qwen3_next")
WHOLE = ("falcon_h1_norm", "granite", "nemotron_h_moe", "qwen3_5_moe")
MARGIN = 2e-3
"""Two best logits nearer than this may change places: ten times what logits may be off."""


@pytest.fixture(scope="module", params=POOLED)
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


def check_state(got, want, arrays, key):
    """Within four times float32's error in transformers, or four roundings of the largest value."""
    floor = 4 * np.finfo(np.float32).eps * np.abs(want).max()
    atol = max(4 * arrays[f"error_{key}"], floor)
    np.testing.assert_allclose(got, want, atol=atol, rtol=0, err_msg=key)


def kept(arrays):
    """The prefix of the keys of what transformers keeps for each mixer, in the order of a model's specs."""
    layers = sorted({int(key.split("_")[1]) for key in arrays if key.startswith("state_")})
    return [
        f"state_{layer}" for layer in layers for kind in ("k", "rec") if f"state_{layer}_{kind}" in arrays
    ]


def test_every_fixture_is_checked():
    assert {path.parent.name for path in GOLDEN.glob("*/golden.npz")} == {*POOLED, *WHOLE}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_sequences_give_the_reference_logits(name):
    model, arrays = load(GOLDEN / name), dict(np.load(GOLDEN / name / "golden.npz"))
    tokens = jnp.asarray(arrays["ids_0"])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"float32"}

    @jax.jit
    def forward(params, tokens):
        return model.logits(params, model.hidden(params, tokens, PlainContext(model.specs, 1, len(tokens))))

    check_logits(forward(model.params, tokens), arrays, slice(None))


def test_chunks_through_the_pools_give_the_reference_logits(engine):
    """150 tokens in steps of 64."""
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


def test_states_windows_keys_and_values_after_a_prompt_are_those_of_the_reference(engine):
    """Read from the pools after prefill, where the tree says that the prompt is."""
    engine, arrays = engine
    engine.reset()
    length = int(arrays["lengths"][0])
    prompt = arrays["ids_0"][:length]
    engine.logits(prompt)
    pools, specs = engine.cache.pools, engine.model.specs
    found = engine.cache.host.match(prompt)
    assert found.prefix_len == length
    recurrent, attention = (zip(*leaves, strict=True) for leaves in (pools.ssm[:2], pools.kv))
    for spec, key in zip(specs, kept(arrays), strict=True):
        if isinstance(spec, AttentionSpec):
            k, v = (np.asarray(leaf[found.kv_slots]).transpose(1, 0, 2) for leaf in next(attention))
            if spec.values_in_keys:
                # transformers keeps the latent and the part of the key that heads share as two tensors.
                k, v = np.split(k, [spec.v_head_dim], axis=-1)
            for name, got in ((f"{key}_k", k), (f"{key}_v", v)):
                check_state(got, arrays[name], arrays, name)
        else:
            conv, state = (np.asarray(leaf[found.checkpoint_slot]) for leaf in next(recurrent))
            state = state.transpose(0, 2, 1) if spec.kind == "mamba2" else state
            # transformers keeps as many inputs as the conv has taps; the oldest of them is never read again.
            check_state(conv.T, arrays[f"{key}_conv"][:, 1:], arrays, f"{key}_conv")
            check_state(state, arrays[f"{key}_rec"], arrays, f"{key}_rec")


def test_in_deterministic_mode_experts_and_latents_depend_on_the_prefix_alone():
    """Kimi-Linear has both: the same bits from the whole prompt as after a reused prefix, token by token."""
    arrays = dict(np.load(GOLDEN / "kimi_linear" / "golden.npz"))
    cache = CacheConfig(num_kv_slots=512, num_ssm_slots=24)
    config = EngineConfig(
        max_running=1, max_context=256, token_budget=64, max_extend_rows=1, deterministic=True
    )
    engine = Engine(GOLDEN / "kimi_linear", cache, config)
    ids = arrays["ids_0"][:150]
    whole = engine.logits(ids)
    check_logits(whole, arrays, slice(0, 150))
    engine.reset()
    engine.logits(ids[:77])
    parts = [engine.logits(ids[:120], start=76)]
    parts += [engine.logits(ids[: end + 1], start=end) for end in range(120, 150)]
    assert np.array_equal(np.concatenate(parts), whole[76:])
