"""Faults that other systems of this kind have had (`cases.md`), by number: races, leaks, locks, exhaustion.

Each docstring gives the number, the fault in one line, and what is right. Cases of the tree alone are in
`tests/host`.
"""

import pytest

from mambacache_jax.cache import HybridCache
from mambacache_jax.config import AttentionSpec, CacheConfig, EngineConfig
from mambacache_jax.host.sequence import Status

from .symbolic import BAD_KV, BAD_STATE, plain
from .symbolic_engine import generated, small_engine, tree_slots, writes

P = list(range(8))


# Races between overlapped steps


def test_b44_a_chunks_state_is_published_before_its_result_is_known():
    """B44: a chunk's state goes to the tree before its step wrote it, and copy on write is lost or doubled.

    Right: in program order the slot reads as the state of that chunk; a hit reads the checkpoint's slot once,
    and later chunks read the working slot.
    """
    engine = small_engine(budget=8, interval=8, running=2)
    first = engine.submit(list(range(40)), 1)
    reads = []
    for chunk in range(5):
        (_, row), *_ = engine.step().extend
        assert engine.in_flight is not None
        engine.check_tree()
        assert max(engine.checkpoints()) == (8 * (chunk + 1) if chunk < 4 else 40)
        reads.append(row.read)
    assert reads == [0] + [first.working_slot] * 4
    # Whoever comes now hits what the step still in flight has written.
    second = engine.submit(list(range(48)), 1)
    rows = [engine.step().extend[0][1]]
    assert (second.cached_tokens, rows[0].start) == (40, 40)
    assert rows[0].read in tree_slots(engine)
    engine.run()


@pytest.mark.parametrize("after", range(1, 18))
@pytest.mark.parametrize("page", [1, 4])
def test_b47_a_stop_that_is_known_one_step_late(page, after):
    """B47: the stop is at 7 and the step that tracked 8 is in flight already; state 8 goes under a key of 7.

    Right: what is kept ends at the stop token, with a state of exactly that position or an earlier one.
    """
    engine = small_engine(page=page, track=8)
    text = plain([1, 2], engine.submit([1, 2], 30).params, engine.vocab)[0]
    engine.abort(*engine.live.values())
    assert text.index(text[after - 1]) == after - 1
    sequence = engine.send([1, 2], 30, stop=(text[after - 1],))
    assert generated(sequence) == text[:after]
    end = (2 + after) // page * page
    assert max(engine.checkpoints(), default=0) <= end
    assert engine.host.stats().kv_cached == end
    deepest = max(engine.checkpoints(), default=0)
    assert engine.send([1, 2, *text[:after], 99], 5).cached_tokens == deepest
    engine.check_idle()


@pytest.mark.parametrize("end", range(6, 26))
def test_b49_a_finish_between_two_track_points(end):
    """B49: with one track slot, the state that is adopted is the one that the next track is writing.

    Right: two slots take turns, and the adopted one is not written by the step in flight.
    """
    engine = small_engine(page=4, track=8)
    sequence = engine.submit([1, 2, 3], end)
    while sequence.status is not Status.FINISHED:
        engine.step()
        engine.check()
        if engine.in_flight and sequence.track_slot:
            assert sequence.track_slot not in writes(engine.in_flight[0])
    last = 2 + end
    assert max(engine.checkpoints()) == (last if last % 4 == 0 else last // 8 * 8)
    engine.drain()
    engine.check_idle()


# Leaks and counts


def test_b04_b56_a_hit_whose_admission_fails():
    """B04, B56: the match takes a slot or a lock, admission fails, and neither comes back.

    Right: three failed admissions and an abort leave every count as it was.
    """
    engine = small_engine(kv=32)
    engine.send(P, 4)
    lease = engine.host.lock(engine.host.match(P))
    kv = engine.host.allocate_kv(engine.host.kv[0].num_free)
    before = engine.host.stats()
    waiting = engine.submit([*P, *range(50, 60)], 1)
    for _ in range(3):
        assert engine.scheduler.schedule(in_flight=False) is None
        after = engine.host.stats()
        assert (after.ssm_used, after.kv_used) == (before.ssm_used, before.kv_used)
        assert (after.ssm_protected, after.kv_protected) == (before.ssm_protected, before.kv_protected)
    engine.abort(waiting)
    engine.host.free_kv(kv)
    engine.host.unlock(lease)
    engine.check_idle()


@pytest.mark.parametrize("turns", [0, 1, 2, 6])
def test_b05_b06_aborts_at_any_moment(turns):
    """B05, B06: requests aborted in the queue, or timed out, keep their slots, and a later check fails.

    Right: whenever they end, used slots are the tree's and nothing else.
    """
    engine = small_engine(kv=48, ssm=4, running=2, budget=8, track=4)
    engine.send(P, 4)
    for i in range(6):
        engine.submit([*P, i, i, i], 12)
    for _ in range(turns):
        engine.step()
    for sequence in list(engine.live.values()):
        engine.abort(sequence)
        engine.check()
    engine.drain()
    engine.check_idle()


@pytest.mark.parametrize("turns", range(1, 12))
def test_b08_only_real_slots_are_freed(turns):
    """B08: an entry that was never filled (-1) is freed, and the pool has more free slots than slots.

    Right: whether a track slot exists yet or not, the free list holds each slot once.
    """
    engine = small_engine(ssm=8, track=4)
    sequence = engine.submit(P, 20)
    for _ in range(turns):
        engine.step()
    engine.abort(sequence)
    engine.drain()
    engine.reset()
    assert sorted(engine.host.allocate_ssm(8).tolist()) == list(range(1, 9))


def test_b51_the_cache_off_with_tracking_on():
    """B51: with caching off a request still takes two track slots, more than were reckoned with.

    Right: one state a request; as many run as there are states.
    """
    engine = small_engine(ssm=4, caching=False, track=4, budget=64)
    requests = [engine.submit([i] * 5, 10) for i in range(4)]
    for _ in range(8):
        engine.step()
        assert engine.host.stats().ssm_used == 4
    assert all(sequence.status is Status.RUNNING for sequence in requests)
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("page", [1, 4])
def test_b53_chunked_prefill_with_nothing_published(page):
    """B53: without publishing a chunk, the same chunk runs again until memory is full.

    Right: every step moves on, and KV in use is what has been computed.
    """
    engine = small_engine(caching=False, budget=8, page=page)
    engine.submit(list(range(40)), 1)
    for chunk in range(5):
        (_, row), *_ = engine.step().extend
        assert row.start == 8 * chunk
        assert engine.host.stats().kv_used == 8 * (chunk + 1)
    engine.run()
    assert sum(engine.device.computed) == 40


def test_b54_an_abort_after_the_slot_was_published():
    """B54: a request dies after its slot was published, and the slot is freed under the tree or leaks.

    Right: what was published stays, holds the right state and serves the next request; the rest is freed.
    """
    engine = small_engine(budget=8, interval=8)
    first = engine.submit(list(range(30)), 1)
    engine.step()
    engine.step()
    engine.abort(first)
    engine.check()
    assert engine.checkpoints() == [8, 16]
    assert engine.send(list(range(30))).cached_tokens == 16
    engine.check_idle()


# Locks, eviction, exhaustion


def test_b15_a_leaf_whose_kv_is_locked_and_whose_state_is_not():
    """B15: eviction of a state takes a leaf whose KV a request holds, and asserts.

    Right: the leaf becomes a tombstone; its KV stays and the request goes on.
    """
    engine = small_engine(ssm=3)
    engine.send(P)
    first = engine.submit([*P, 50], 12)
    engine.step()
    engine.step()
    assert first.cached_tokens == 8
    second = engine.submit([9] * 5, 4)
    engine.step()
    assert second.status is Status.RUNNING
    assert 8 not in engine.checkpoints()
    match = engine.host.match(P)
    assert match.kv_len == 8
    engine.run()
    engine.check_idle()


def test_b16_a_state_attached_to_a_node_that_others_hold():
    """B16: one holds a node without a state, a state comes, and the first to leave unlocks the other's.

    Right: each gives back what it took; the state stays until the last reader has been enqueued.
    """
    engine = small_engine()
    engine.send(P)
    engine.host.evict(ssm=100)
    engine.send([*P[:7], 60], 1)
    engine.host.evict(ssm=100)
    first = engine.submit([*P, 70], 20)
    engine.step()
    second = engine.submit([*P, 80], 4)
    step = engine.scheduler.schedule(in_flight=True)
    assert second.cached_tokens == 8
    engine.abort(first)
    engine.host.evict(ssm=100)
    assert 8 in engine.checkpoints()
    tokens = engine.device.run(step.plan, step.shape)
    engine.scheduler.enqueued(step)
    engine.complete(*engine.in_flight)
    engine.in_flight = (step, tokens)
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("ssm", [1, 2, 3, 4])
def test_b57_all_states_are_taken(ssm):
    """B57: with every state locked, a chunk that wants one kills the scheduler.

    Right: an optional checkpoint is skipped and counted, an admission is put off, and all finish.
    """
    engine = small_engine(ssm=ssm, track=4, interval=4, budget=8)
    for i in range(6):
        engine.submit([*P, i, i], 10)
    engine.run()
    assert len(engine.finished) == 6
    assert engine.skipped("no_slot") > 0
    engine.check_idle()


def test_b57_kv_runs_out_while_all_run():
    """B57: likewise of KV. Right: the latest are sent back, the first goes on, and all finish."""
    engine = small_engine(kv=40, page=4, context=40, track=4)
    for i in range(4):
        engine.submit([i] * 3, 30)
    engine.run()
    assert len(engine.finished) == 4
    assert engine.scheduler.stats.preemptions > 0
    engine.check_idle()


def test_b60_a_model_without_states():
    """B60: a model without recurrent layers crashes in decode. Right: refused when the cache is made."""
    with pytest.raises(ValueError, match="no recurrent layer"):
        HybridCache((AttentionSpec(1, 4, 4),), CacheConfig(8, 2), EngineConfig(), "float32")


def test_b61_a_reset_while_requests_run_and_wait():
    """B61: the cache is emptied while requests resume, and stale state indices are used.

    Right: one running and one preempted request both compute again from the start, and their texts are right.
    """
    engine = small_engine(kv=20, context=20, budget=8)
    first, second = engine.submit(P, 12), engine.submit([9] * 5, 12)
    while second.status is not Status.WAITING or not second.num_generated:
        engine.step()
    assert first.status is Status.RUNNING
    engine.reset()
    stats = engine.host.stats()
    assert (stats.kv_used, stats.ssm_used, stats.nodes) == (0, 0, 0)
    engine.device.ssm = [BAD_STATE] * len(engine.device.ssm)
    engine.device.kv = [BAD_KV] * len(engine.device.kv)
    (_, row), *_ = engine.step().extend
    assert (row.start, row.read) == (0, 0)
    engine.run(first, second)
    engine.check_idle()


def test_b61_a_prompt_is_not_matched_across_a_reset():
    """B61: a match from before the reset is used after it. Right: the next request finds nothing."""
    engine = small_engine()
    engine.send(P)
    engine.reset()
    assert engine.send(P).cached_tokens == 0
    engine.check_idle()
