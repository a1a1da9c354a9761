"""Which request computes what in each step, and who computes a shared prefix."""

import pytest

from mambacache_jax.host.sequence import Status

from .symbolic_engine import generated, small_engine


def chunks(step):
    """(request, start, tokens) of each extend row."""
    return [(seq.request_id, row.start, len(row.tokens)) for seq, row in step.extend]


def decoded(step):
    return [seq.request_id for seq in step.decode]


# Order and chunks


def test_requests_are_served_in_order_of_arrival():
    engine = small_engine(running=1)
    requests = [engine.submit([i] * 5) for i in range(4)]
    engine.run()
    assert engine.finished == requests


def test_a_request_that_finds_no_room_is_not_overtaken():
    engine = small_engine(kv=32, budget=32)
    first = engine.submit([1] * 20, 8)
    engine.step()
    large, small = engine.submit([2] * 20, 4), engine.submit([3], 1)
    while first.status is Status.RUNNING:
        assert large.status is small.status is Status.WAITING
        engine.step()
    engine.step()
    assert large.status is small.status is Status.RUNNING
    engine.run()


@pytest.mark.parametrize(("prompt_len", "admitted"), [(14, True), (15, False)])
def test_admission_needs_room_for_the_prompt_and_a_page_for_each_that_runs(prompt_len, admitted):
    engine = small_engine(kv=32)
    engine.submit([1] * 16, 8)
    engine.step()
    # The first one takes its 17th slot before the second is looked at.
    second = engine.submit([2] * prompt_len, 2)
    engine.scheduler.schedule(in_flight=True)
    assert (second.status is Status.RUNNING) == admitted


def test_prefill_is_cut_to_the_budget_while_others_decode():
    engine = small_engine(budget=16)
    engine.submit([1] * 4, 20)
    engine.step()
    engine.submit([2] * 40, 2)
    steps = [engine.step() for _ in range(4)]
    assert [chunks(step) for step in steps] == [[(2, 0, 16)], [(2, 16, 16)], [(2, 32, 8)], []]
    assert [decoded(step) for step in steps] == [[1], [1], [1], [1, 2]]
    engine.run()


def test_a_part_filled_block_counts_as_a_block():
    engine = small_engine(budget=8, block=4)
    engine.submit([1] * 5)
    engine.submit([2] * 3)
    engine.submit([3] * 3)
    assert [chunks(engine.step()) for _ in range(2)] == [[(1, 0, 5)], [(2, 0, 3), (3, 0, 3)]]
    engine.run()


def test_no_more_rows_extend_in_a_step_than_the_limit():
    engine = small_engine(rows=2)
    for i in range(4):
        engine.submit([i], 1)
    assert [chunks(engine.step()) for _ in range(2)] == [[(1, 0, 1), (2, 0, 1)], [(3, 0, 1), (4, 0, 1)]]
    engine.run()


def test_the_last_token_that_the_limit_allows_is_not_fed():
    engine = small_engine()
    engine.send([1] * 10, 5)
    assert sum(engine.device.computed) == 10 + 4


def test_in_deterministic_mode_decode_rows_are_extend_rows_too():
    engine = small_engine(deterministic=True)
    engine.submit([1] * 5, 4)
    engine.submit([2] * 5, 4)
    assert [chunks(engine.step()) for _ in range(2)] == [[(1, 0, 5), (2, 0, 5)], [(1, 5, 1), (2, 5, 1)]]
    engine.run()


def test_a_younger_request_cannot_starve_the_oldest():
    engine = small_engine(kv=24, ssm=4, running=3, budget=8, context=24)
    for i in range(150):
        engine.submit([i % 5] * (1 + i % 7), 1 + i % 9)
        engine.step()
        engine.check()
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    engine.check_idle()


# What is reused


@pytest.mark.parametrize(("page", "hit"), [(1, 9), (4, 8)])
def test_the_same_prompt_again_computes_only_its_last_tokens(page, hit):
    engine = small_engine(page=page)
    prompt = list(range(10))
    first, second = engine.send(prompt), engine.send(prompt)
    assert (first.cached_tokens, second.cached_tokens) == (0, hit)
    assert engine.device.computed == [10, 10 - hit]


def test_states_are_exported_in_the_middle_of_a_chunk():
    engine = small_engine(interval=4, budget=16, block=8)
    engine.submit(list(range(15)))
    step = engine.step()
    (_, row), *_ = step.extend
    assert (len(row.tokens), [position for position, _ in row.exports]) == (15, [12, 14])
    engine.run()
    assert engine.checkpoints() == [12, 14, 18]


def test_a_chunk_exports_its_last_multiple_of_the_interval():
    engine = small_engine(interval=8, budget=20)
    engine.send(list(range(50)))
    assert engine.checkpoints() == [16, 40, 48, 49, 50]


def test_the_next_turn_of_a_conversation_computes_only_what_is_new():
    engine = small_engine()
    first = engine.send(list(range(10)), 6)
    turn = [*range(10), *generated(first), 77, 78]
    second = engine.send(turn, 1)
    # The last sampled token was never fed, so its state is not there.
    assert second.cached_tokens == 15
    assert second.computed_tokens == 3


def test_a_prompt_that_goes_on_after_anothers_end_hits_its_end():
    engine = small_engine(page=4)
    engine.send(list(range(13)))
    assert engine.send(list(range(20))).cached_tokens == 12


def test_the_second_sharer_plants_a_checkpoint_at_the_branch_and_the_third_hits_it():
    engine = small_engine()
    shared = list(range(20))
    hits = [engine.send([*shared, 100 + i, 200 + i]).cached_tokens for i in range(3)]
    assert hits == [0, 0, 20]
    assert 20 in engine.checkpoints()


def test_the_reuse_limit_is_kept_though_more_is_cached():
    engine = small_engine(interval=4)
    engine.send(list(range(20)))
    assert engine.send(list(range(20)), reuse_limit=18).cached_tokens == 16
    assert engine.send(list(range(20)), reuse_limit=0).cached_tokens == 0


def test_another_namespace_does_not_hit():
    engine = small_engine()
    for namespace in (None, "a", "b"):
        assert engine.send(list(range(10)), namespace=namespace).cached_tokens == 0
    for namespace in (None, "a", "b"):
        assert engine.send(list(range(10)), namespace=namespace).cached_tokens == 9
        assert engine.checkpoints(namespace) == [9, 10]


def test_another_namespace_does_not_wait():
    engine = small_engine(budget=64)
    requests = [engine.submit(list(range(20)), 1, namespace=namespace) for namespace in ("a", "b", None)]
    engine.run()
    assert [seq.cached_tokens for seq in requests] == [0, 0, 0]
    assert engine.scheduler.stats.waits == 0


@pytest.mark.parametrize(("budget", "waits"), [(8, 0), (64, 3)])
def test_sharers_that_arrive_together_compute_their_prefix_once(budget, waits):
    # A small budget keeps them out until the first is nearly done, a large one would let them in at once.
    engine = small_engine(budget=budget)
    shared = list(range(32))
    requests = [engine.submit([*shared, 100 + i, 200 + i], 1) for i in range(4)]
    engine.run()
    assert [seq.cached_tokens for seq in requests] == [0, 32, 32, 32]
    assert sum(engine.device.computed) == 34 + 3 * 2
    assert engine.scheduler.stats.waits == waits


@pytest.mark.parametrize(("wait", "waits", "hit"), [(0, 0, 0), (1, 5, 4), (2, 9, 8), (64, 15, 20)])
def test_waiting_for_a_shared_prefix_is_bounded(wait, waits, hit):
    # Each of five prompts shares four tokens more with the last one, so that there is always one to wait for.
    engine = small_engine(budget=128, running=8, rows=8, wait=wait)
    prompt = list(range(40))
    for i in range(1, 6):
        engine.submit([*prompt[: 4 * i], 500 + i, 600 + i], 1)
    last = engine.submit(prompt, 1)
    engine.run()
    assert (engine.scheduler.stats.waits, last.cached_tokens) == (waits, hit)
    assert last.waited == 0, "it may wait as long again if it is sent back"


def test_waiting_ends_when_the_request_that_was_to_publish_is_aborted():
    engine = small_engine(budget=8)
    first = engine.submit(list(range(30)))
    second = engine.submit(list(range(30)))
    engine.step()
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
    engine.abort(first)
    assert chunks(engine.step()) == [(2, 0, 8)]
    engine.run()


@pytest.mark.parametrize("steps", range(4))
def test_sharers_that_arrive_while_the_first_computes_still_get_their_checkpoint(steps):
    engine = small_engine(budget=8)
    shared = list(range(32))
    engine.submit([*shared, 100, 200], 1)
    for _ in range(steps):
        engine.step()
    late = [engine.submit([*shared, 101 + i, 201 + i], 1) for i in range(2)]
    engine.run()
    assert [seq.cached_tokens for seq in late] == [32, 32]


def test_a_request_that_waits_for_a_prefix_keeps_its_place():
    engine = small_engine(running=2, budget=32)
    engine.submit(list(range(20)), 8)
    sharer, other, last = engine.submit(list(range(20)), 1), engine.submit([500], 8), engine.submit([600], 1)
    engine.step()
    assert other.status is Status.RUNNING
    assert list(engine.scheduler.waiting) == [sharer, last]
    engine.run()
    assert engine.finished.index(sharer) < engine.finished.index(last)


def test_while_one_waits_for_a_prefix_others_are_admitted():
    engine = small_engine(budget=8, block=4)
    engine.submit(list(range(20)))
    engine.step()
    sharer, other = engine.submit(list(range(20))), engine.submit([500] * 3)
    engine.step()
    assert sharer.status is Status.WAITING
    step = engine.step()
    assert other.request_id in [request for request, _, _ in chunks(step)]
    engine.run()
    assert sharer.cached_tokens == 19
