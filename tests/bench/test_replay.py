"""A replay keeps the stated number of requests in flight and never two turns of one conversation."""

import numpy as np

from mambacache_jax.bench.replay import replay
from mambacache_jax.config import CacheConfig, EngineConfig, SamplingParams

CACHE = CacheConfig(num_kv_slots=16, num_ssm_slots=4)


def run(fake_engine, sessions, concurrency):
    engine = fake_engine("fake", CACHE, EngineConfig())
    prompts = [f"prompt {i}" for i in range(len(sessions))]
    params = [SamplingParams(max_tokens=2)] * len(sessions)
    return engine, replay(engine, prompts, params, sessions, concurrency)


def test_results_come_in_the_order_of_the_requests(fake_engine):
    _, result = run(fake_engine, [-1] * 12, 3)
    assert [bytes(c.token_ids) for c in result.completions] == [
        f"prompt {i}"[-2:].encode() for i in range(12)
    ]
    assert sorted(result.order) == list(range(12))
    assert result.order != list(range(12))
    assert len(result.pool_use) == 12
    np.testing.assert_allclose(result.ttft_ms(), 1.0)


def test_no_more_requests_are_in_flight_than_said(fake_engine):
    engine, _ = run(fake_engine, [-1] * 12, 3)
    assert engine.most_in_flight == 3


def test_a_turn_waits_for_the_turn_before_it(fake_engine):
    engine, result = run(fake_engine, [0, 0, 0, 1, 1, 1], 4)
    assert engine.most_in_flight == 2
    assert [i for i in result.order if i < 3] == [0, 1, 2]
    assert [i for i in result.order if i >= 3] == [3, 4, 5]


def test_a_broken_invariant_is_reported_not_raised(fake_engine):
    engine = fake_engine("fake", CACHE, EngineConfig())
    engine.broken = "slot 3 has two owners"
    result = replay(engine, ["a"], [SamplingParams()], [-1], 1)
    assert result.broken == "slot 3 has two owners"
