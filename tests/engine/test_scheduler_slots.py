"""Which states are kept, what ends and interruptions give back, and who gets slots when they run out."""

import pytest

from mambacache_jax.config import SamplingParams
from mambacache_jax.host.sequence import Status

from .symbolic import plain
from .symbolic_engine import generated, small_engine

# Decode tracking


def track_slots(engine, sequence, steps):
    """(position, read, write) of each decode row of a request."""
    seen = []
    for _ in range(steps):
        step = engine.step()
        engine.check()
        fields = step.shape.unpack(step.plan)
        index = step.decode.index(sequence)
        seen.append(
            tuple(int(fields[name][index]) for name in ("decode_position", "decode_read", "decode_write"))
        )
        if sequence.track_slot:
            assert sequence.track_slot not in fields["decode_write"], "the state kept for the tree."
    return seen


def test_two_slots_take_turns_at_track_points():
    engine = small_engine(track=4)
    sequence = engine.submit([1] * 3, 20)
    engine.step()
    seen = track_slots(engine, sequence, 12)
    turns = [(position, read, write) for position, read, write in seen if read != write]
    assert [position for position, _, _ in turns] == [4, 8, 12]
    a, b = turns[0][1:]
    assert [slots for _, *slots in turns] == [[a, b], [b, a], [a, b]]
    assert {slot for _, *slots in seen for slot in slots} == {a, b}
    assert (sequence.track_slot, sequence.track_position, sequence.working_slot) == (a, 12, b)
    engine.run()


def test_a_track_point_costs_no_step_and_moves_no_data():
    engine = small_engine(track=4)
    engine.send([1] * 3, 20)
    assert engine.device.computed == [3] + [1] * 19


@pytest.mark.parametrize(
    ("max_tokens", "adopted", "kv"),
    [(4, [4, 8], 8), (5, [4, 8], 8), (8, [4, 8], 12), (10, [4, 16], 16), (13, [4, 16], 16)],
)
def test_a_finish_adopts_the_newest_state_on_a_page_boundary(max_tokens, adopted, kv):
    # 7 tokens, pages of 4, tracks at 8 and 16: KV of whole pages, the state of the end or of the last track.
    engine = small_engine(page=4, track=8)
    engine.send([1, 2, 3, 4, 5, 6, 7], max_tokens)
    assert engine.checkpoints() == adopted
    assert engine.host.stats().kv_cached == kv


def test_without_a_slot_for_tracking_decoding_goes_on_in_place():
    engine = small_engine(ssm=1, track=4)
    sequence = engine.send([1] * 3, 20)
    assert len(generated(sequence)) == 20
    # The prompt's end, then each track point at which a slot was asked for.
    assert engine.skipped("no_slot") == 1 + 5
    assert engine.checkpoints() == [22]


def test_tracking_takes_the_least_recently_used_checkpoint_when_no_slot_is_free():
    engine = small_engine(ssm=3, track=4)
    engine.send([9] * 5)
    assert engine.checkpoints() == [4, 5]
    engine.send([1] * 3, 8)
    assert engine.host.stats().ssm_evicted > 0
    engine.check_idle()


# Stop, finish, abort


def submit_stopped(engine, prompt, after, max_tokens=40):
    """Submits a prompt whose `after`-th generated token is its stop token."""
    text, _ = plain(prompt, SamplingParams(after), 1000)
    assert text.index(text[-1]) == after - 1
    return engine.submit(prompt, max_tokens, stop=(text[-1],))


@pytest.mark.parametrize(("page", "track"), [(1, 4), (1, 8), (4, 4), (4, 8)])
@pytest.mark.parametrize("after", range(1, 11))
def test_after_a_stop_nothing_beyond_the_stop_token_is_kept(page, track, after):
    engine = small_engine(page=page, track=track)
    sequence = submit_stopped(engine, [1, 2, 3, 4, 5], after)
    while sequence.status is not Status.FINISHED:
        engine.step()
    # The step that was fed the stop token is still in flight.
    assert engine.in_flight[0].decode == (sequence,)
    end = (5 + after) - (5 + after) % page
    stats = engine.host.stats()
    assert (stats.kv_used, stats.kv_cached) == (end, end)
    assert stats.ssm_used == stats.ssm_cached
    assert max(engine.checkpoints()) <= end
    assert page > 1 or max(engine.checkpoints()) == 5 + after
    engine.drain()
    engine.check_idle()


def test_what_a_finished_request_overshot_does_not_touch_who_gets_its_row_and_slots():
    engine = small_engine(kv=16, ssm=2, running=1, track=4, context=16)
    submit_stopped(engine, [1, 2, 3], 3, 10)
    engine.submit([7] * 8, 8)
    engine.run()
    engine.check_idle()


def test_a_waiting_request_is_aborted_without_a_trace():
    engine = small_engine(running=1)
    engine.submit([1] * 5)
    waiting = engine.submit([2] * 5)
    engine.step()
    engine.abort(waiting)
    assert (waiting.status, waiting.finish_reason) == (Status.FINISHED, "abort")
    engine.run()
    assert len(engine.finished) == 1
    engine.check_idle()


def test_a_request_aborted_in_prefill_gives_all_back_at_once():
    engine = small_engine(budget=8)
    sequence = engine.submit([1] * 30)
    engine.step()
    engine.abort(sequence)
    engine.check()
    assert engine.host.stats().kv_used == engine.host.stats().ssm_used == 0
    engine.drain()
    engine.check_idle()


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_a_request_aborted_while_it_decodes_keeps_only_what_was_published(steps):
    engine = small_engine(track=4)
    sequence = engine.submit([1] * 5, 20)
    for _ in range(steps):
        engine.step()
    engine.abort(sequence)
    engine.check()
    assert engine.checkpoints() == [4]
    other = engine.submit([2] * 5, 4)
    engine.run(other)
    engine.check_idle()


def test_aborting_twice_or_after_the_end_changes_nothing():
    engine = small_engine()
    sequence = engine.send([1] * 5)
    engine.scheduler.abort(sequence)
    assert sequence.finish_reason == "length"
    waiting = engine.submit([2])
    engine.abort(waiting)
    engine.abort(waiting)
    engine.check_idle()


def test_all_running_requests_can_be_sent_back_and_go_on_where_they_were():
    engine = small_engine(running=3, budget=8)
    requests = [engine.submit([i] * 6, 8) for i in range(4)]
    for _ in range(5):
        engine.step()
    engine.preempt_all()
    assert list(engine.scheduler.waiting) == requests
    engine.check()
    engine.run()
    engine.check_idle()


# Slots run out


def test_the_latest_request_is_sent_back_when_kv_runs_out_and_resumes_from_its_deepest_checkpoint():
    engine = small_engine(kv=24, context=24)
    first, second = engine.submit([1] * 8, 11), engine.submit([2] * 6, 12)
    third = engine.submit([3] * 6, 2)
    while second.status is not Status.WAITING or not second.num_generated:
        engine.step()
        engine.check()
    assert first.status is Status.RUNNING
    assert list(engine.scheduler.waiting) == [second, third]
    # Its last tokens made room for the first; what its prompt published is still there.
    assert 5 in engine.checkpoints()
    known = len(second.buffer)
    start = None
    while start is None:
        step = engine.step()
        start = next((row.start for seq, row in step.extend if seq is second), None) if step else None
    assert start == 5
    engine.run()
    assert second.computed_tokens == 6 + known - 5
    engine.check_idle()


def test_a_request_that_is_sent_back_leaves_what_it_tracked_to_the_tree():
    engine = small_engine(kv=40, page=4, track=8, budget=32, context=40)
    first, second = engine.submit([1] * 15, 16), engine.submit([2] * 6, 14)
    while second.status is not Status.WAITING or not second.num_generated:
        engine.step()
        engine.check()
    # It had 15 tokens: the first took its last page and that of 8 to 12, and left it the state at 8.
    assert 8 in engine.checkpoints()
    engine.run(first)
    assert len(second.buffer) == 16
    engine.run()
    assert second.computed_tokens == 6 + 16 - 8
    engine.check_idle()


def test_nobody_is_sent_back_while_a_step_is_in_flight():
    engine = small_engine(kv=16, context=16)
    first, second = engine.submit([1] * 6, 10), engine.submit([2] * 6, 10)
    while engine.step() is not None:
        assert engine.scheduler.stats.preemptions == 0
    assert engine.scheduler.stats.preemptions == 0
    assert engine.in_flight is None
    assert first.status is second.status is Status.RUNNING
    engine.step()
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
    engine.run()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "at least one token"),
        ([1] * 100, 30, "100 prompt tokens and max_tokens=30 exceed the context of 128"),
        ([1] * 60, 6, "A request of 66 tokens can never fit 64 KV slots"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_when_it_is_submitted(prompt, max_tokens, message):
    engine = small_engine(kv=64, page=4)
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, max_tokens)
    assert not engine.scheduler.has_work()


@pytest.mark.parametrize("page", [1, 4])
def test_a_request_that_just_fits_the_pool_runs_alone_with_one_state(page):
    engine = small_engine(kv=64, ssm=1, page=page)
    # The last token is never fed, so it needs no slot.
    sequence = engine.send([1] * 60, 5)
    again = engine.send([1] * 60, 5)
    assert generated(sequence) == generated(again)
    engine.check_idle()


def test_with_one_state_slot_the_second_request_waits_rather_than_dies():
    engine = small_engine(ssm=1)
    first, second = engine.submit([1] * 6, 6), engine.submit([2] * 6, 6)
    while first.status is Status.RUNNING or not first.num_generated:
        engine.step()
        assert second.status is Status.WAITING
    engine.run()
    engine.check_idle()


def test_a_request_whose_own_hit_holds_the_last_slot_computes_without_it():
    engine = small_engine(ssm=1)
    engine.send([1] * 6)
    assert engine.checkpoints() == [6]
    assert engine.send([1] * 10).cached_tokens == 0


def test_checkpoints_that_find_no_slot_are_counted():
    engine = small_engine(ssm=1)
    engine.send([1] * 10)
    assert (engine.skipped("no_slot"), engine.skipped("limit")) == (1, 0)


def test_checkpoints_beyond_two_a_row_and_step_are_counted_and_the_branch_is_kept():
    engine = small_engine(interval=8)
    engine.send([*range(6), 100, 101])
    engine.host.evict(ssm=100)
    before = engine.skipped("limit")
    engine.send([*range(6), 200, 201, 202, 203, 204, 205])
    assert engine.skipped("limit") == before + 1
    assert engine.checkpoints() == [6, 11, 12]


def test_without_a_slot_for_the_state_the_kv_still_tells_the_next_where_to_branch():
    engine = small_engine(ssm=1)
    engine.submit([1, 2, 3, 4, 5, 6, 7, 8], 4)
    engine.step()
    match = engine.host.match([1, 2, 3, 4, 9])
    assert (match.prefix_len, match.branch_position) == (0, 4)
    engine.run()


def test_a_failed_admission_gives_back_all_that_it_took():
    engine = small_engine(kv=32, ssm=8)
    engine.send([1] * 10)
    lease = engine.host.lock(engine.host.match([1] * 10))
    kv = engine.host.allocate_kv(engine.host.kv[0].num_free)
    waiting = engine.submit([1] * 10 + [2] * 5)
    for _ in range(3):
        assert engine.scheduler.schedule(in_flight=False) is None
        engine.host.check_invariants(kv.tolist())
    engine.host.free_kv(kv)
    states = engine.host.allocate_ssm(engine.host.ssm[0].num_free + engine.host.evictable_ssm())
    for _ in range(3):
        assert engine.scheduler.schedule(in_flight=False) is None
        engine.host.check_invariants((), states.tolist())
    engine.host.free_ssm(states)
    engine.host.unlock(lease)
    engine.check()
    engine.run(waiting)
    assert waiting.cached_tokens == 10
    engine.check_idle()


def test_a_checkpoint_is_kept_until_the_step_that_reads_it_is_enqueued():
    engine = small_engine()
    engine.send([1] * 10)
    assert engine.checkpoints() == [9, 10]
    engine.submit([1] * 10)
    step = engine.scheduler.schedule(in_flight=False)
    engine.host.evict(ssm=100)
    assert engine.checkpoints() == [9]
    tokens = engine.device.run(step.plan, step.shape)
    engine.scheduler.enqueued(step)
    engine.host.evict(ssm=100)
    assert engine.checkpoints() == []
    engine.in_flight = (step, tokens)
    engine.run()


def test_the_kv_of_a_running_request_cannot_be_evicted():
    engine = small_engine()
    sequence = engine.submit([1] * 10, 10)
    for _ in range(4):
        engine.step()
        engine.host.evict(kv=1000, ssm=1000)
        engine.check()
    assert engine.host.stats().kv_cached >= 9
    engine.run(sequence)


def test_rewritten_tables_and_new_pages_of_many_rows_fit_one_plan():
    # A row whose table is rewritten and which opens a page in the next run of the table needs two updates.
    engine = small_engine(running=5, rows=5, budget=64, block=1, wait=0)
    long, shorts = [9] * 100, [[i] * 64 for i in range(1, 5)]
    engine.send(long)
    engine.host.evict(ssm=100)
    for prompt in shorts:
        engine.send(prompt[:63])
    for prompt in shorts:
        engine.host.match(prompt, max_len=62)
    engine.host.evict(ssm=4)
    assert engine.checkpoints() == [62] * 4
    for prompt in (long, *shorts):
        engine.submit(prompt, 8)
    engine.run()
    engine.check_idle()


# Without a cache


def test_with_the_cache_off_nothing_is_kept_and_no_state_is_exported():
    engine = small_engine(caching=False, track=4)
    texts = [generated(engine.send([1] * 10, 12)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert engine.scheduler.stats.cached_tokens == engine.skipped("no_slot") == 0
    stats = engine.host.stats()
    assert (stats.kv_used, stats.ssm_used) == (0, 0)
    engine.check_idle()


def test_with_the_cache_off_a_request_uses_one_state():
    engine = small_engine(caching=False, track=4)
    engine.submit([1] * 10, 12)
    for _ in range(8):
        engine.step()
        assert engine.host.stats().ssm_used == 1
    engine.run()


def test_with_the_cache_off_a_preempted_request_starts_again_and_makes_progress():
    engine = small_engine(caching=False, kv=24, context=24, budget=8)
    engine.submit([1] * 8, 16)
    engine.submit([2] * 6, 12)
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    engine.check_idle()
