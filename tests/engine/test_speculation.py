"""An engine that speculates writes what it writes without, through cache, preemption, stops and tracking."""

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig, EngineConfig, SamplingParams, SpecConfig
from mambacache_jax.engine import Engine

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
PROMPTS = [CODE, "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(", "x"]
DRAFTS = {
    "ngram": SpecConfig(draft="ngram", num_nodes=8, topk=2, steps=4, state_mode="replay_exact"),
    "mtp": SpecConfig(draft="mtp", num_nodes=4, topk=1, steps=3, state_mode="replay_parallel"),
    "snapshot": SpecConfig(draft="ngram", num_nodes=4, steps=3, state_mode="snapshot"),
}


@pytest.fixture(scope="module")
def build(model):
    """`build(spec, **changes)`: an engine of one shape."""
    made = {}

    def make(spec=None, **cache):
        fields = {"num_kv_slots": 256, "num_ssm_slots": 24, "track_interval": 16, **cache}
        key = spec, tuple(sorted(fields.items()))
        if key not in made:
            config = EngineConfig(
                max_running=4, max_context=256, token_budget=64, debug=fields.get("page_size", 1) == 1
            )
            made[key] = Engine(model, CacheConfig(**fields), config, DRAFTS[spec] if spec else None)
        made[key].reset()
        return made[key]

    return make


def texts(engine, prompts, params):
    done = engine.generate(prompts, params)
    engine.check_invariants()
    return [(c.token_ids, c.text, c.finish_reason) for c in done]


@pytest.mark.parametrize("spec", DRAFTS)
def test_texts_are_those_of_the_plain_engine(build, spec):
    plain, fast = build(), build(spec)
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=33, temperature=0.8, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=5, speculate=False),
    ]
    assert texts(fast, PROMPTS, params) == texts(plain, PROMPTS, params)
    # The second time prompts come from the cache.
    assert texts(fast, PROMPTS, params) == texts(plain, PROMPTS, params)
    stats = fast.stats()
    assert stats.cached_tokens > 0
    assert stats.spec_rounds < stats.spec_tokens


@pytest.mark.parametrize("spec", ["ngram", "snapshot"])
def test_a_stop_inside_a_run_ends_the_text_there_and_the_next_turn_finds_a_right_state(build, spec):
    plain, fast = build(), build(spec)
    (full,) = plain.generate([CODE], SamplingParams(max_tokens=48, ignore_eos=True))
    for stop in (full.text[20:23], full.text[9:11]):
        params = SamplingParams(max_tokens=48, stop=(stop,), ignore_eos=True)
        (want,), (got,) = texts(plain, [CODE], params), texts(fast, [CODE], params)
        assert got == want
        turn = [*fast.model.tokenizer.encode(CODE), *got[0], *b"\n\ndef div(a, b):\n"]
        after = SamplingParams(max_tokens=24, ignore_eos=True)
        assert texts(fast, [turn], after) == texts(plain, [turn], after)


@pytest.mark.parametrize("spec", ["ngram", "mtp"])
def test_preempted_requests_resume_with_the_same_text(build, spec):
    plain = build()
    fast = build(spec)
    prompts = [CODE, CODE[:50] + "q", CODE[20:], "import os\n" * 5]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    assert texts(fast, prompts, params) == texts(plain, prompts, params)
    assert fast.stats().preemptions > 0


def test_pages_and_a_cache_that_is_off_change_nothing(build):
    plain = build()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    want = texts(plain, PROMPTS, params)
    assert texts(build("ngram", page_size=4), PROMPTS, params) == want
    assert texts(build("ngram", prefix_caching=False), PROMPTS, params) == want


def test_a_state_that_was_tracked_inside_a_run_serves_the_next_turn(build):
    plain, fast = build(), build("ngram")
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    (first,) = fast.generate([CODE], params)
    turn = np.array([*fast.model.tokenizer.encode(CODE), *first.token_ids, *b" # "])
    (second,) = fast.generate([turn], params)
    # All but the last round's tokens were folded when the answer ended.
    assert second.cached_tokens > len(turn) - 3 - DRAFTS["ngram"].depth - 1
    assert second.token_ids == plain.generate([turn], params)[0].token_ids


def test_warmed_rounds_compile_nothing_more(model):
    config = EngineConfig(max_running=4, max_context=256, token_budget=64)
    cache = CacheConfig(num_kv_slots=256, num_ssm_slots=24, track_interval=16)
    engine = Engine(model, cache, config, DRAFTS["mtp"])
    engine.warm_up()
    engine.generate(PROMPTS, SamplingParams(max_tokens=20))
    assert engine.stats().recompiles_after_warmup == 0


@pytest.mark.parametrize(
    ("spec", "fields", "why"),
    [
        (SpecConfig(), {"deterministic": True}, "deterministic"),
        (SpecConfig(), {"return_logits": True}, "return_logits"),
        (SpecConfig(num_nodes=64, steps=3, topk=4, draft="mtp"), {}, r"\[2, 37\]"),
        (SpecConfig(num_nodes=64, steps=20), {}, "two track points"),
    ],
)
def test_what_does_not_go_together_is_refused(model, spec, fields, why):
    config = EngineConfig(max_running=4, max_context=256, token_budget=64, **fields)
    with pytest.raises(ValueError, match=why):
        Engine(model, CacheConfig(num_kv_slots=512, num_ssm_slots=24, track_interval=16), config, spec)
