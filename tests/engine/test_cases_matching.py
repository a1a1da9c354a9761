"""Faults that other systems of this kind have had (`cases.md`), by number: matching and wrong states.

Each docstring gives the number, the fault in one line, and what is right. Cases of the tree alone are in
`tests/host`.
"""

import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import StampMismatch

from .symbolic import KV, State, plain, states
from .symbolic_engine import generated, small_engine, tree_slots, writes

P = list(range(8))


# Matching


@pytest.mark.parametrize(("page", "hit"), [(1, 7), (4, 4)])
def test_b01_the_same_prompt_again(page, hit):
    """B01: the look-up is capped at len - 1, above the only state, so the same prompt never hits.

    Right: the second send hits, and the state of the whole prompt serves the prompt with more behind it.
    """
    engine = small_engine(page=page)
    assert [engine.send(P).cached_tokens for _ in range(3)] == [0, hit, hit]
    assert engine.send([*P, 50]).cached_tokens == 8


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_b01_short_prompts_again(length):
    """B01: prompts under one block of a coarse grid never hit. Right: they hit all but their last token."""
    engine = small_engine()
    assert [engine.send(P[:length]).cached_tokens for _ in range(2)] == [0, length - 1]


@pytest.mark.parametrize("page", [1, 4])
def test_b02_sharers_one_after_the_other(page):
    """B02: the only state lies in the unique suffix, so sharers never hit.

    Right: the first hits nothing, the second nothing but plants a state where they part, the third hits it.
    """
    engine = small_engine(page=page)
    prompts = [[*P, *range(100 * i, 100 * i + 6)] for i in range(1, 4)]
    assert [engine.send(prompt).cached_tokens for prompt in prompts] == [0, 0, 8]
    assert 8 in engine.checkpoints()


@pytest.mark.parametrize("budget", [4, 8, 16, 64])
def test_b02_sharers_that_arrive_together(budget):
    """B02: of four concurrent sharers one hits. Right: one computes the shared tokens, three take them."""
    engine = small_engine(budget=budget)
    requests = [engine.submit([*P, *range(100 * i, 100 * i + 6)], 1) for i in range(1, 5)]
    engine.run()
    assert [seq.cached_tokens for seq in requests] == [0, 8, 8, 8]


def test_b03_a_shifted_boundary():
    """B03: keeping only the last block's state turns a slightly shorter shared prefix into no hit, silently.

    Right: after the second request a state lies at or before the boundary, and a counter tells how much KV
    matched where no state did.
    """
    engine = small_engine(page=4, context=64)
    shared = list(range(15))
    engine.send([*shared[:12], *range(100, 110)])
    engine.send([*shared, *range(200, 207)])
    assert 12 in engine.checkpoints()
    assert engine.host.stats().kv_only_tokens == 12
    assert engine.send([*shared, *range(300, 307)]).cached_tokens == 12


@pytest.mark.parametrize("page", [1, 4])
def test_b10_a_state_inside_a_page(page):
    """B10: the key is cut to a page while the state is not, so tokens are folded twice.

    Right: states are only ever taken at page boundaries, whatever the lengths.
    """
    engine = small_engine(page=page, track=4, budget=8)
    for length in range(1, 20):
        engine.send([length] * length, 1 + length % 7)
    assert len(engine.checkpoints()) > 15
    assert all(position % page == 0 for position in engine.checkpoints())
    with pytest.raises(ValueError, match="track_interval must be a positive multiple of page_size=4"):
        CacheConfig(64, 8, 4, track_interval=6)


def test_b12_b13_prompts_that_end_inside_a_page():
    """B12, B13: a match inside a page leaves an empty node. Right: whole pages hit, all can go."""
    engine = small_engine(page=4)
    engine.send(P)
    assert [engine.send(P[:length]).cached_tokens for length in (7, 3)] == [4, 0]
    engine.host.evict(kv=1000)
    engine.check_idle()
    assert engine.host.stats().kv_used == 0


def test_b14_a_state_below_a_node_without_one():
    """B14: the walk stops at the first node without a state. Right: the deepest state on the path is hit."""
    engine = small_engine()
    prompt = list(range(20))
    engine.send(prompt[:8])
    engine.host.evict(ssm=100)
    engine.send(prompt[:16])
    assert [p for p in engine.checkpoints() if p <= 8] == [8]
    engine.host.match(prompt[:16])
    engine.host.evict(ssm=2)
    assert engine.checkpoints() == [16]
    assert engine.send(prompt).cached_tokens == 16


def test_b17_a_page_larger_than_any_prompt():
    """B17: a block size beyond the context makes caching silently inert. Right: refused when it is made."""
    with pytest.raises(ValueError, match="Pages of 16 tokens"):
        small_engine(page=16, context=12)
    small_engine(page=16, context=12, caching=False)


# Wrong states


@pytest.mark.parametrize("interval", [0, 4])
def test_b09_rows_of_different_lengths_in_one_step(interval):
    """B09: exports are placed on one grid over the flattened batch, wrong for all rows but the first.

    Right: each row's states are those of its own tokens, as when it runs alone.
    """
    prompts = [list(range(100 * n, 100 * n + n)) for n in (6, 7, 9)]
    together = small_engine(interval=interval, budget=32)
    for prompt in prompts:
        together.submit(prompt, 1)
    step = together.step()
    assert [len(row.tokens) for _, row in step.extend] == [6, 7, 9]
    together.check_tree()
    together.run()
    alone = small_engine(interval=interval, budget=32)
    for prompt in prompts:
        alone.send(prompt)
    assert together.checkpoints() == alone.checkpoints()


@pytest.mark.parametrize("budget", [4, 8, 12])
@pytest.mark.parametrize("page", [1, 4])
def test_b24_chunks_that_end_off_a_boundary(budget, page):
    """B24: a chunk's end is hashed as a boundary though it is none.

    Right: every state lies at a multiple of the page, and is the state of exactly the tokens above it.
    """
    engine = small_engine(page=page, budget=budget, interval=4, track=4)
    for i in range(4):
        engine.submit([*P, *range(100 * i, 100 * i + 2 + i)], 5)
    engine.run()
    assert all(position % page == 0 for position in engine.checkpoints())
    engine.check_idle()


def test_b26_exports_that_the_device_does_not_write():
    """B26: a back end never writes the exported states, and the tree stores whatever the slots held.

    Right: the device's own stamp is compared when a state is adopted; the tree never takes it.
    """
    engine = small_engine()
    engine.device.drop_exports = True
    engine.submit(P)
    with pytest.raises(StampMismatch, match="is offered at 7 and was written at -9"):
        engine.step()
    assert engine.checkpoints() == []


def test_b26_a_slot_that_holds_an_older_state():
    """B26: a slot is reused and its old state served. Right: a stamp of another position is refused."""
    engine = small_engine(ssm=2)
    engine.send([9] * 5)
    engine.device.drop_exports = True
    engine.submit(P)
    with pytest.raises(StampMismatch, match="is offered at 7 and was written at"):
        engine.step()
    assert 7 not in engine.checkpoints()


def test_b27_padded_decode_rows():
    """B27: padding rows take slots from the stale end of a buffer. Right: they write only the null slot."""
    engine = small_engine(running=16, budget=64, rows=16, track=4)
    for i in range(11):
        engine.submit([i] * (1 + i % 4), 8)
    engine.run(engine.submit([50], 1))
    for _ in range(5):
        before = list(engine.device.ssm)
        step = engine.step()
        fields = step.shape.unpack(step.plan)
        assert step.shape.decode_rows > len(step.decode) == 11
        for name in ("decode_row", "decode_read", "decode_write", "decode_page"):
            assert not fields[name][11:].any(), name
        changed = {slot for slot, state in enumerate(engine.device.ssm) if state != before[slot]}
        assert changed <= writes(step)
    engine.run()


def test_b27_padded_blocks_and_exports():
    """B27: likewise of unused blocks, rows and exports. Right: all of them name the null slot."""
    engine = small_engine(budget=64, rows=4)
    engine.submit(P)
    step = engine.step()
    fields = step.shape.unpack(step.plan)
    assert fields["block_row"].tolist()[2:] == [4] * (step.shape.blocks - 2)
    assert not fields["block_length"][2:].any()
    assert not fields["write"][1:].any()
    assert fields["export_slot"].ravel().tolist()[1:] == [0] * 7
    engine.run()


def test_b30_a_slot_that_another_request_had():
    """B30: on a hit the working slot is read before the checkpoint is in it.

    Right: the first step reads the checkpoint's slot and writes its own, which held another request's state.
    """
    engine = small_engine(ssm=3)
    engine.send(P)
    engine.host.evict(ssm=1)
    engine.send([9] * 5)
    second = engine.submit([*P, 50, 51], 3)
    step = engine.step()
    (_, row), *_ = step.extend
    assert (second.cached_tokens, row.start) == (8, 8)
    assert row.read in tree_slots(engine)
    assert row.write != row.read
    engine.run()


def test_b32_slots_are_not_cleared_and_nobody_reads_what_was_in_them():
    """B32: states are not zeroed when a slot is given away again, and the null block is shared.

    Right: a fresh request reads the zero state whatever any slot holds, the null slot included.
    """
    engine = small_engine(kv=64, ssm=4)
    engine.send(P, 10)
    engine.reset()
    engine.device.ssm = [State(777, 777)] * len(engine.device.ssm)
    engine.device.kv = [KV(777, 777, 777)] * len(engine.device.kv)
    sequence = engine.submit(P, 10)
    step = engine.step()
    assert step.extend[0][1].read == 0
    engine.run()
    assert generated(sequence) == plain(P, sequence.params, engine.vocab)[0]


@pytest.mark.parametrize("max_tokens", range(1, 14))
@pytest.mark.parametrize("page", [1, 4])
def test_b33_an_end_on_or_beside_a_boundary(page, max_tokens):
    """B33: an answer that ends exactly on a block boundary is copied backwards or past the table.

    Right: each state in the tree is the state of its path, and the next turn hits the last whole page.
    """
    engine = small_engine(page=page, track=4)
    first = engine.send(P[:6], max_tokens)
    end = 6 + max_tokens - 1
    expected = {5 // page * page, end // page * page} - {0}
    assert expected <= set(engine.checkpoints()) | {4}
    turn = [*P[:6], *generated(first), 900, 901]
    assert engine.send(turn).cached_tokens == end // page * page
    engine.check_idle()


def test_b39_a_hit_gives_the_state_that_a_cold_run_has():
    """B39: checkpoints take another path than states, so that a hit differs from a miss.

    Right: the state exported inside a chunk is the one that a run which stops there has.
    """
    inside, cold = small_engine(interval=4), small_engine()
    inside.send(P)
    cold.send(P[:5], 1)
    for engine, length in ((inside, 7), (cold, 4), (cold, 5)):
        slot = engine.host.match(P, max_len=length).checkpoint_slot
        assert engine.device.ssm[slot] == states(P)[length]
    assert inside.send([*P, 1], 6).cached_tokens == 8


@pytest.mark.parametrize("page", [1, 4])
def test_b43_a_state_that_the_tree_adopted_is_never_written_again(page):
    """B43: a live slot changes hands and a late write of the step in flight lands in it.

    Right: what is adopted, and what a request reads from the tree, is in no later step's writes.
    """
    engine = small_engine(kv=64, ssm=8, page=page, track=4, running=3)
    for i in range(40):
        engine.submit([*P[: i % 7], *[50 + i % 3] * (1 + i % 5)], 1 + i % 9, stop=(i % 5,))
    while engine.scheduler.has_work():
        adopted = tree_slots(engine)
        step = engine.scheduler.schedule(in_flight=engine.in_flight is not None)
        if step is None:
            engine.drain()
            continue
        # What the tree still owns once the step is planned, it owned before it.
        assert not writes(step) & tree_slots(engine) & adopted
        tokens = engine.device.run(step.plan, step.shape)
        engine.scheduler.enqueued(step)
        before, engine.in_flight = engine.in_flight, (step, tokens)
        if before:
            engine.complete(*before)
        engine.check()
    engine.drain()
    engine.check_idle()
