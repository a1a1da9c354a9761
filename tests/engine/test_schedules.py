"""Whatever the schedule, texts are a plain loop's, slots hold what their owner believes, and nothing leaks,
starves or dies: random arrivals, evictions, aborts, preemptions and resets, on a symbolic device.
"""

import collections

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mambacache_jax.config import CacheConfig, EngineConfig

from .symbolic_engine import SymbolicEngine, generated

VOCAB = 3
STEMS = (
    [0, 1, 2, 0, 2, 1, 1, 0, 2, 2, 0, 1, 1, 2, 0, 0, 1, 2],
    [0, 1, 2, 0, 2, 1, 1, 2, 2, 0, 1, 0],
    [2, 2, 1],
    [],
)

SETTINGS = settings(
    max_examples=220,
    stateful_step_count=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class Schedules(RuleBasedStateMachine):
    """One engine, small enough that slots are short all the time."""

    def __init__(self, totals):
        """`totals` counts over all runs, to see afterwards that they met what they are meant to meet."""
        super().__init__()
        self.totals = totals

    @initialize(
        page_size=st.sampled_from([1, 4]),
        kv_pages=st.integers(4, 24),
        ssm_slots=st.sampled_from([1, 2, 3, 4, 6, 12, 30]),
        caching=st.sampled_from([True, True, True, False]),
        track_interval=st.sampled_from([4, 8]),
        checkpoint_interval=st.sampled_from([0, 8]),
        token_budget=st.sampled_from([8, 12, 16]),
        max_running=st.integers(1, 4),
        max_extend_rows=st.integers(1, 3),
        max_wait_steps=st.sampled_from([0, 3, 3]),
        deterministic=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        page_size,
        kv_pages,
        ssm_slots,
        caching,
        track_interval,
        checkpoint_interval,
        token_budget,
        max_running,
        max_extend_rows,
        max_wait_steps,
        deterministic,
        seed,
    ):
        cache = CacheConfig(
            num_kv_slots=4 * kv_pages,
            num_ssm_slots=ssm_slots,
            page_size=page_size,
            prefix_caching=caching,
            track_interval=track_interval,
            checkpoint_interval=checkpoint_interval,
        )
        config = EngineConfig(
            max_running=max_running,
            max_context=40,
            token_budget=token_budget,
            block_tokens=4,
            max_extend_rows=max_extend_rows,
            max_wait_steps=max_wait_steps,
            deterministic=deterministic,
        )
        self.engine = SymbolicEngine(cache, config, VOCAB, seed)
        self.asked = 0

    @rule(
        base=st.integers(0, 7),
        cut=st.sampled_from([None, None, 16, 9, 4]),
        tails=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), min_size=1, max_size=3),
        max_tokens=st.sampled_from([1, 3, 8, 16, 16]),
        stop=st.sampled_from([(), (), (0,), (1, 2)]),
        seed=st.sampled_from([0, 0, 5]),
        namespace=st.sampled_from([None, None, None, "other"]),
        reuse_limit=st.sampled_from([None, None, None, None, 0, 5]),
    )
    def submit(self, base, cut, tails, max_tokens, stop, seed, namespace, reuse_limit):
        engine = self.engine
        # A stem, or a conversation so far, as another turn would send it.
        texts = [*STEMS, *(seq.buffer.array(0, len(seq.buffer)).tolist() for seq in engine.finished[-4:])]
        for tail in tails:
            prompt = (texts[base % len(texts)][:cut] + tail)[-24:]
            total, page = len(prompt) + max_tokens, engine.cache_config.page_size
            fits = total <= 40 and -(-(total - 1) // page) * page <= engine.cache_config.num_kv_slots
            try:
                engine.submit(
                    prompt, max_tokens, stop=stop, seed=seed, namespace=namespace, reuse_limit=reuse_limit
                )
                refused = False
            except ValueError:
                refused = True
            assert refused != bool(prompt and fits)

    @rule(turns=st.integers(1, 8))
    def step(self, turns):
        for _ in range(turns):
            self.engine.step()
            self.engine.check()

    @precondition(lambda self: self.engine.live)
    @rule(which=st.integers(0, 10))
    def abort(self, which):
        live = list(self.engine.live.values())
        self.engine.abort(live[which % len(live)])

    @rule(kv=st.sampled_from([0, 1, 4, 100]), ssm=st.sampled_from([0, 1, 2, 100]))
    def evict(self, kv, ssm):
        self.engine.host.evict(kv=kv, ssm=ssm)

    @rule(how=st.sampled_from(["drain", "drain", "preempt_all", "reset"]))
    def interrupt(self, how):
        before = self.engine.scheduler.stats.preemptions
        getattr(self.engine, how)()
        self.asked += self.engine.scheduler.stats.preemptions - before

    def run_to_the_end(self):
        self.engine.run()
        self.engine.check_idle()

    @invariant()
    def owners_and_contents_agree(self):
        self.engine.check()

    def teardown(self):
        self.run_to_the_end()
        engine, stats = self.engine, self.engine.scheduler.stats
        assert not engine.live
        self.totals.update(
            steps=engine.steps,
            requests=len(engine.finished),
            tokens=sum(len(generated(seq)) for seq in engine.finished),
            hits=stats.cached_tokens,
            preemptions=stats.preemptions - self.asked,
            waits=stats.waits,
            skipped=self.engine.skipped("no_slot"),
            dropped=self.engine.skipped("limit"),
            evicted=engine.host.stats().kv_evicted,
            lost=engine.host.stats().ssm_evicted,
        )


def test_no_schedule_changes_a_text_or_loses_a_slot():
    totals = collections.Counter()
    run_state_machine_as_test(lambda: Schedules(totals), settings=SETTINGS)
    assert totals["steps"] > 10000, totals
    assert min(totals.values()) > 25, totals
