"""Faults that others have shipped, planted one by one, do not get past the checks of these tests."""

import functools

import jax
import numpy as np
import pytest

from mambacache_jax.host.plan import pack_sampling

from .rounds import ROWS, Run, plain_texts, round_program, speculate

CHECKED = ["tree", "right", "late", "wrong"]


def passes(run, rounds=5, **options):
    """Whether texts are those of plain decoding, and states after a fold have its bits."""
    texts = plain_texts(run.temperature)
    try:
        speculate(run, CHECKED, rounds, **options)
        run.fold()
    except AssertionError:
        # The lengths that the device keeps have come apart from the texts.
        return False
    if any(run.texts[r] != list(texts[r][: len(run.texts[r])]) for r in range(ROWS)):
        return False
    plain = Run(temperature=run.temperature).decode_to([len(text) for text in run.texts])
    plain.fold()
    got, want = run.state(), plain.state()
    return all(
        a.tobytes() == b.tobytes() for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)
    )


class Faulty(Run):
    """A run with a fault after each round."""

    def round(self, *args, **kwargs):
        before = jax.device_get(self.pending)
        out = super().round(*args, **kwargs)
        self.fault(before)
        return out


class RootDropped(Faulty):
    def fault(self, before):
        """The first token of each run does nothing to the state."""
        pending = jax.tree.map(np.array, jax.device_get(self.pending))
        for inputs in pending.inputs:
            for x in (inputs.k, inputs.v, inputs.log_decay, inputs.beta):
                if x is not None:
                    x[:, 0] = 0
        self.pending = pending


class HistoryForgotten(Faulty):
    def fault(self, before):
        """A window behind a run that is shorter than it holds zeros instead of what came before."""
        self.fold()
        pools = jax.device_get(self.pools)
        windows = tuple(np.array(leaf) for leaf in pools.ssm.conv)
        for leaf in windows:
            for r, accepted in enumerate(self.accepted[-1]):
                leaf[1 + r, : max(0, leaf.shape[1] - accepted)] = 0
        self.pools = pools._replace(ssm=pools.ssm._replace(conv=windows))


class FoldedTwice(Faulty):
    def fault(self, before):
        """The states fold what is pending, and it stays pending; stamps are as if it had not been folded."""
        kept, stamps = jax.device_get((self.pending, self.pools.ssm.position))
        self.fold()
        self.pending = kept
        self.pools = self.pools._replace(ssm=self.pools.ssm._replace(position=stamps))


class StalePending(Faulty):
    def fault(self, before):
        """The inputs are those of the round before."""
        self.pending = before._replace(length=self.pending.length)


class CoinByBatchRow(Run):
    def round(self, *args, order=None, **kwargs):
        """The seed is that of the place in the batch."""
        place = np.argsort(np.arange(ROWS) if order is None else order)
        self.sampling = np.stack([pack_sampling(self.temperature, 1.0, 0.0, 0, int(r)) for r in place])
        return super().round(*args, order=order, **kwargs)


def test_without_a_fault_all_checks_pass():
    assert passes(Run())
    assert passes(Run(temperature=1.0), order=[2, 0, 1])


@pytest.mark.parametrize("fault", [RootDropped, HistoryForgotten, FoldedTwice, StalePending])
def test_a_fault_in_what_is_pending_is_caught(fault):
    assert not passes(fault())


def test_a_coin_keyed_by_the_place_in_the_batch_is_caught():
    assert passes(CoinByBatchRow(temperature=1.0), order=[0, 1, 2])
    assert not passes(CoinByBatchRow(temperature=1.0), order=[2, 0, 1])


def test_node_indices_taken_for_path_positions_are_caught(monkeypatch):
    from mambacache_jax.models import verify as verify_module

    real = verify_module.commit

    def by_node_index(pools, pending, values, accepted, *args, **kwargs):
        index = np.arange(accepted.path.shape[1], dtype=np.int32)[None, :] + 0 * accepted.path
        return real(pools, pending, values, accepted._replace(path=index), *args, **kwargs)

    monkeypatch.setattr(verify_module, "commit", by_node_index)

    # A function of its own, or JAX would find the program that has been traced before.
    @functools.partial(jax.jit, static_argnames=("mode", "interval"))
    def faulty(*args, mode, interval):
        return round_program.__wrapped__(*args, mode=mode, interval=interval)

    assert not passes(Run(program=faulty))
