"""The engine's text is the model's own: cache, batch and schedule save work and change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mambacache_jax.config import SamplingParams
from mambacache_jax.engine import assert_no_recompile
from mambacache_jax.errors import StampMismatch
from mambacache_jax.models.plain import PlainContext

CODE = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def plain_logits(model, tokens):
    """The whole sequence at once, without pools."""
    ctx = PlainContext(model.specs, 1, len(tokens))

    @jax.jit
    def run(params, tokens):
        return model.logits(params, model.hidden(params, tokens, ctx))

    return np.asarray(run(model.params, jnp.asarray(tokens, jnp.int32)))


@pytest.fixture(scope="module")
def warm(make_engine):
    engine = make_engine()
    engine.warm_up()
    return engine


@pytest.fixture
def engine(warm):
    """One warm engine, emptied; what a test leaves behind is checked after it."""
    warm.reset()
    yield warm
    while warm.has_work():
        warm.step()
    warm.check_invariants()
    assert warm.cache.host.evictable_kv() == warm.cache.host.kv[0].num_used
    assert warm.cache.host.evictable_ssm() == warm.cache.host.ssm[0].num_used


def test_greedy_tokens_are_those_of_the_whole_sequence_at_once(engine, model):
    prompt = model.tokenizer.encode(CODE * 2)
    out = engine.generate([prompt], GREEDY)[0]
    logits = plain_logits(model, [*prompt, *out.token_ids])[len(prompt) - 1 : -1]
    best = np.sort(logits, axis=-1)
    for row, token, margin in zip(logits, out.token_ids, best[:, -1] - best[:, -2], strict=True):
        assert token == row.argmax() or margin < 1e-3


def test_logits_come_through_the_pools_and_equal_the_plain_ones(engine, model):
    tokens = model.tokenizer.encode(CODE * 4)
    np.testing.assert_allclose(engine.logits(tokens), plain_logits(model, tokens), atol=1e-4)


def test_logits_after_a_reused_prefix_are_the_same(engine, model):
    tokens = model.tokenizer.encode(CODE * 4)
    whole = engine.logits(tokens)
    before = engine.stats()
    rest = engine.logits(tokens, start=len(tokens) - 1)
    assert engine.stats().computed_tokens == before.computed_tokens + 1
    np.testing.assert_allclose(rest, whole[-1:], atol=1e-4)


def test_the_same_prompt_again_computes_one_token(engine):
    first, second = (engine.generate([CODE], GREEDY)[0] for _ in range(2))
    assert (first.cached_tokens, first.computed_tokens) == (0, len(CODE))
    assert (second.cached_tokens, second.computed_tokens) == (len(CODE) - 1, 1)
    assert first.token_ids == second.token_ids


def test_the_next_turn_reuses_prompt_and_answer(engine):
    first = engine.generate([CODE], GREEDY)[0]
    turn = [*CODE.encode(), *first.token_ids, *b"\nprint("]
    second = engine.generate([turn], GREEDY)[0]
    # The last token of an answer is sampled and never fed, so the state ends one before it.
    assert second.cached_tokens == len(CODE) + len(first.token_ids) - 1


def test_the_third_sharer_of_a_prefix_hits_where_the_second_left_it(engine):
    hits = [engine.generate([CODE + tail * 9], GREEDY)[0].cached_tokens for tail in "abc"]
    assert hits == [0, 0, len(CODE)]


def test_with_the_cache_off_tokens_are_the_same_and_nothing_is_kept(engine, make_engine):
    prompts = [CODE + text for text in ("import os", "import sys", "class A:", "import os")]
    off = make_engine(prefix_caching=False)
    assert [c.token_ids for c in off.generate(prompts, GREEDY)] == [
        c.token_ids for c in engine.generate(prompts, GREEDY)
    ]
    off.check_invariants()
    assert off.stats().kv_used == off.stats().ssm_used == off.stats().cached_tokens == 0


def test_a_poisoned_null_slot_changes_nothing(engine, poison):
    prompts = [CODE[:n] for n in (1, 5, 40, 77)]
    clean = [c.token_ids for c in engine.generate(prompts, GREEDY)]
    engine.reset()
    poison(engine)
    assert [c.token_ids for c in engine.generate(prompts, GREEDY)] == clean


def test_nothing_is_compiled_after_warm_up(engine):
    before = engine.stats().recompiles_after_warmup
    with assert_no_recompile():
        engine.generate([CODE * n for n in (1, 2, 3, 4, 5)], GREEDY)
        engine.generate([CODE], SamplingParams(max_tokens=5, temperature=1.0, top_k=9, top_p=0.9, min_p=0.01))
    assert engine.stats().recompiles_after_warmup == before


def test_a_steps_only_transfer_to_the_device_is_its_plan(engine, monkeypatch):
    plans = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x: plans.append(x.dtype) or put(x))
    steps = []
    run = engine.cache.run
    monkeypatch.setattr(engine.cache, "run", lambda program, plan: steps.append(plan) or run(program, plan))
    with jax.transfer_guard_host_to_device("disallow"):
        engine.generate([CODE * n for n in (1, 3, 2)], GREEDY)
    assert len(plans) == len(steps) > 12
    assert set(plans) == {np.dtype(np.int32)}


def test_assert_no_recompile_sees_a_compilation():
    with pytest.raises(AssertionError, match="compiled where none should be"), assert_no_recompile():
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(3.0))


def test_warm_up_publishes_prefixes_of_any_length(engine):
    for length in (1, 30, 31, 64, 65, 200):
        engine.reset()
        system = (CODE * 3)[:length]
        engine.warm_up([system])
        assert engine.generate([system + "x = 1"], GREEDY)[0].cached_tokens == length


def test_the_batch_does_not_change_a_sampled_text(engine):
    params = [SamplingParams(max_tokens=16, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(6)]
    together = engine.generate([CODE] * 6, params)
    engine.reset()
    alone = [engine.generate([CODE], p)[0] for p in params]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) > 1


def test_streamed_text_is_the_generated_text(engine):
    whole = engine.generate([CODE], GREEDY)[0]
    deltas = list(engine.stream(CODE, GREEDY))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(deltas) > 4


def test_a_stop_string_ends_and_cuts_the_text_and_is_never_streamed(engine):
    free = engine.generate([CODE], SamplingParams(max_tokens=24, ignore_eos=True))[0]
    stop = free.text[5:8]
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop, "never seen"))
    out = engine.generate([CODE], params)[0]
    assert out.finish_reason == "stop"
    assert out.text == free.text[: free.text.index(stop)]
    streamed = "".join(d.text for d in engine.stream(CODE, params))
    assert streamed == out.text


def test_a_stop_token_ends_the_request_and_is_kept_out_of_the_text(engine):
    free = engine.generate([CODE], GREEDY)[0]
    stop = free.token_ids[4]
    at = free.token_ids.index(stop)
    out = engine.generate([CODE], SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))[0]
    assert (out.finish_reason, out.token_ids) == ("stop", free.token_ids[: at + 1])
    assert out.text == free.text[:at]


def test_what_overshot_a_stop_token_is_freed_and_what_is_kept_ends_with_it(engine):
    free = engine.generate([CODE], GREEDY)[0]
    engine.reset()
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(free.token_ids[0],))
    out = engine.generate([CODE], params)[0]
    while engine.has_work():
        engine.step()
    assert len(out.token_ids) == 1
    assert engine.stats().kv_used <= len(CODE) + 1


def test_a_request_can_be_aborted_at_any_time(engine):
    for steps in range(6):
        request = engine.submit(CODE * 3, GREEDY)
        other = engine.submit(CODE, GREEDY)
        done = [c for _ in range(steps) for c in engine.step()]
        engine.abort(request)
        while engine.has_work():
            done.extend(engine.step())
        reasons = {c.request_id: c.finish_reason for c in done}
        assert reasons == {request: "abort", other: "length"}
        engine.check_invariants()


def test_leaving_a_stream_aborts_its_request(engine):
    stream = engine.stream(CODE, GREEDY)
    next(stream)
    stream.close()
    while engine.has_work():
        assert engine.step() == []


def test_a_stream_gets_all_its_text_though_others_drive_the_engine(engine):
    whole = engine.generate([CODE], GREEDY)[0]
    stream = engine.stream(CODE, GREEDY)
    deltas = [next(stream)]
    engine.generate(["hello"], SamplingParams(max_tokens=30, ignore_eos=True))
    deltas += stream
    assert "".join(d.text for d in deltas) == whole.text
    assert deltas[-1].finish_reason == "length"


def test_an_interrupted_step_ends_what_was_in_flight_and_leaves_an_engine_that_works(
    make_engine, monkeypatch
):
    """An interrupt may come while tokens are awaited, or after the pools were donated."""
    engine = make_engine()
    whole = engine.generate([CODE], GREEDY)[0]
    for method, calls in (("_complete", 4), ("_complete", 1), ("run", 3)):
        owner = engine if method == "_complete" else engine.cache
        original, count = getattr(owner, method), [0]

        def interrupted(*args, original=original, count=count, calls=calls):
            count[0] += 1
            if count[0] == calls:
                if len(args) == 2 and callable(args[0]):
                    args[0](engine.cache.pools, args[1])  # donated, and what came back is lost
                raise KeyboardInterrupt
            return original(*args)

        other = engine.submit(CODE * 2, GREEDY)
        monkeypatch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([CODE, "x"], GREEDY)
        monkeypatch.undo()
        assert [(c.request_id, c.finish_reason) for c in engine.step()] == [(other, "abort")]
        assert not engine.has_work()
        engine.check_invariants()
        assert engine.stats().kv_used == engine.stats().ssm_used == 0
        assert engine.generate([CODE], GREEDY)[0].token_ids == whole.token_ids


def test_a_reset_in_mid_flight_only_costs_time(engine):
    free = engine.generate([CODE * 2, CODE], GREEDY)
    engine.reset()
    ids = [engine.submit(CODE * 2, GREEDY), engine.submit(CODE, GREEDY)]
    done = {}
    for step in range(400):
        if step in (1, 3, 7):
            engine.reset()
            engine.check_invariants()
        done.update({c.request_id: c.token_ids for c in engine.step()})
    assert [done[i] for i in ids] == [c.token_ids for c in free]


def test_a_step_is_enqueued_before_the_tokens_of_the_one_before_are_read(engine):
    engine.submit(CODE, SamplingParams(max_tokens=3, ignore_eos=True))
    lengths = []
    sequence = next(iter(engine._requests.values())).sequence
    while engine._requests:
        engine.step()
        lengths.append((sequence.num_generated, sequence.in_flight))
    assert lengths[:3] == [(0, 1), (1, 1), (2, 1)]


def test_other_namespaces_never_share(engine):
    engine.generate([CODE], GREEDY, namespace="a")
    assert engine.generate([CODE], GREEDY, namespace="b")[0].cached_tokens == 0
    assert engine.generate([CODE], GREEDY)[0].cached_tokens == 0
    assert engine.generate([CODE], GREEDY, namespace="a")[0].cached_tokens == len(CODE) - 1


def test_logits_of_sampled_positions_come_along_when_asked_for(make_engine, model):
    out = make_engine(return_logits=True).generate([CODE], GREEDY)[0]
    assert out.logits.shape == (12, 256)
    assert out.logits.argmax(-1).tolist() == out.token_ids


def test_debug_mode_refuses_a_state_that_the_device_did_not_write(make_engine):
    """B26: a back end that never writes its exports must not have its garbage cached."""
    engine = make_engine(debug=True)
    engine.generate([CODE], GREEDY)
    engine.check_invariants()
    written = engine.cache.run

    def run_without_stamps(program, plan):
        output = written(program, plan)
        engine.cache.replace_pools(
            lambda pools: pools._replace(ssm=pools.ssm._replace(position=jnp.zeros_like(pools.ssm.position)))
        )
        return output

    engine.cache.run = run_without_stamps
    with pytest.raises(StampMismatch, match="but the device last wrote it after 0"):
        engine.generate([CODE * 2], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([""], None, "at least one token"),
        ([[]], None, "at least one token"),
        ([[1, 256]], None, "Token id 256 is outside the vocabulary of 256"),
        ([[1, -1]], None, "Token id -1 is outside"),
        ([[0.5]], None, "got float64"),
        (["a" * 510], SamplingParams(max_tokens=3), "exceed the context of 512"),
        ("abc", None, "list of prompts"),
        (["a", "b"], [SamplingParams()], "2 prompts and 1 sampling"),
        (["a", "b"], [SamplingParams(), {"max_tokens": 3}], "must be SamplingParams"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_left_behind(engine, prompts, params, message):
    good = [] if isinstance(prompts, str) or isinstance(params, list) else ["fine"]
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts if isinstance(prompts, str) else [*good, *prompts], params)
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": float("nan")}, "temperature must be in"),
        ({"temperature": 1e300}, "temperature must be in"),
        ({"top_k": 2**31}, "top_k must be in"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"min_p": 1.5}, "min_p must be in"),
        ({"seed": -1}, "seed must be in"),
        ({"stop": "x"}, "stop must be a tuple of strings"),
        ({"stop": (b"x",)}, "stop must be a tuple of strings"),
        ({"stop": ("",)}, "must not be empty"),
        ({"stop_token_ids": 10}, "stop_token_ids must be a tuple"),
    ],
)
def test_bad_sampling_parameters_are_refused_when_they_are_made(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_a_namespace_that_cannot_be_a_key_is_refused(engine):
    with pytest.raises(ValueError, match="A namespace is None"):
        engine.submit(CODE, GREEDY, namespace=["x"])
    assert not engine.has_work()


def test_deterministic_mode_refuses_sizes_for_which_it_does_not_hold(make_engine):
    for fields in ({"state_dtype": "bfloat16"}, {"page_size": 48, "num_kv_slots": 480, "track_interval": 48}):
        with pytest.raises(ValueError, match="Deterministic mode needs"):
            make_engine(deterministic=True, checkpoint_interval=0, **fields)


def test_bad_sizes_are_refused_with_the_way_out(make_engine, model):
    with pytest.raises(ValueError, match=f"exceeds the model's {model.max_context} positions"):
        make_engine(max_context=model.max_context + 1)
    with pytest.raises(ValueError, match="start=5 must be in"):
        make_engine().logits([1, 2, 3], start=5)
    engine = make_engine(num_kv_slots=64)
    with pytest.raises(ValueError, match="can never fit 64 KV slots"):
        engine.submit("a" * 70, GREEDY)
