"""Recursive rejection leaves the target's distribution as it is, counted over every draft and every coin.

The decisions are those of the compiled rule; the measure of the coins that lead to each of them is exact, so
nothing here is statistics. Rules that are known to be biased are counted in the same way.
"""

import itertools

import jax
import numpy as np
import pytest

from mambacache_jax.spec import DraftTree, reject

VOCAB, DEPTH = 3, 3
# Two siblings behind the bonus token, and a draft behind the first of them.
PARENT = np.array([-1, 0, 0, 1], np.int32)
judge = jax.jit(reject, static_argnames=("depth", "with_replacement"))


def distributions(seed):
    """`p[0], q[0]` behind the bonus token, `p[1][a], q[1][a]` behind draft `a`, `p[2]` behind the next."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.dirichlet(np.full(VOCAB, 0.7), shape)

    return (draw(), draw(VOCAB), draw(VOCAB)), (draw(), draw(VOCAB))


def weight_of(drafts, q, replaced):
    """The probability that siblings `a, b` and the draft `c` behind `a` are drawn."""
    a, b, c = drafts
    second = q[0][b] if replaced else (b != a) * q[0][b] / (1 - q[0][a])
    return q[0][a] * second * q[1][a][c]


def cases(drafts, p, q, replaced):
    """Every way that coins can fall: `(coins, last coin, measure)`, by the rule as the module states it."""

    def tries(order, at, p_left, q_left, coins, measure):
        # `order`: siblings still to be tried as (node, token).
        if not order:
            bounds = np.concatenate([[0.0], np.cumsum(p_left)])
            for low, high in itertools.pairwise(bounds):
                if high > low:
                    yield dict(coins), (low + high) / 2, measure * (high - low)
            return
        (node, token), *rest = order
        chance = min(1.0, p_left[token] / q_left[token]) if q_left[token] > 0 else 0.0
        if chance > 0:
            more = [(3, drafts[2])] if node == 1 else []
            # Only the first sibling has a draft behind it.
            dist = (p[1][token], q[1][token]) if node < 3 else (p[2][token], q[1][token])
            yield from tries(more, node, *dist, {**coins, node: chance / 2}, measure * chance)
        if chance < 1:
            left = np.maximum(p_left - q_left, 0)
            left = left / left.sum() if q_left[token] > 0 else p_left
            q_next = q_left
            if not replaced:
                q_next = np.where(np.arange(VOCAB) == token, 0, q_left)
                q_next = q_next / max(q_next.sum(), 1e-300)
            yield from tries(
                rest, at, left, q_next, {**coins, node: (1 + chance) / 2}, measure * (1 - chance)
            )

    yield from tries([(1, drafts[0]), (2, drafts[1])], 0, p[0], q[0], {}, 1.0)


def joint(seed, *, drawn_with_replacement, judged_with_replacement, drafts_of=None):
    """The exact joint distribution of a run's first two tokens (index `VOCAB`: the run ended after one)."""
    p, q = distributions(seed)
    rows, weights = [], []
    for drafts in itertools.product(range(VOCAB), repeat=3):
        if drafts_of is None:
            chance = weight_of(drafts, q, drawn_with_replacement)
        else:
            chance = float(drafts[:2] == drafts_of(q)) * q[1][drafts[0]][drafts[2]]
        for coins, last, measure in cases(drafts, p, q, judged_with_replacement) if chance else ():
            rows.append((drafts, [coins.get(node, 0.5) for node in range(4)], last))
            weights.append(chance * measure)
    # One shape for all, so that one program is compiled; the rest are padding rows.
    padded = 512
    assert len(rows) <= padded
    tokens, coins, last = np.zeros((padded, 4), np.int32), np.zeros((padded, 4)), np.zeros(padded)
    target, draft = np.zeros((2, padded, 4, VOCAB))
    for r, (drafts, of_row, of_end) in enumerate(rows):
        a, b, c = drafts
        tokens[r], coins[r], last[r] = [0, a, b, c], of_row, of_end
        target[r], draft[r] = [p[0], p[1][a], p[1][b], p[2][c]], [q[0], q[1][a], q[1][b], q[1][c]]
    tree = DraftTree(tokens, np.tile(PARENT, (padded, 1)), np.where(np.arange(padded) < len(rows), 4, 0))
    arrays = (x.astype(np.float32) for x in (target, draft, coins, last))
    tree = DraftTree(*(x.astype(np.int32) for x in tree))
    got = jax.device_get(judge(tree, *arrays, depth=DEPTH, with_replacement=judged_with_replacement))
    out = np.zeros((VOCAB, VOCAB + 1))
    assert not got.length[len(rows) :].any()
    for r, weight in enumerate(weights):
        second = got.tokens[r, 1] if got.length[r] > 1 else VOCAB
        out[got.tokens[r, 0], second] += weight
    return out, p


def bias(out, p):
    """Total variation of the first token, and of the second where there is one, from the target's."""
    first = 0.5 * np.abs(out.sum(axis=1) - p[0]).sum()
    longer = out[:, :VOCAB]
    second = 0.5 * np.abs(longer - longer.sum(axis=1, keepdims=True) * p[1]).sum()
    return first + second


@pytest.mark.parametrize("replaced", [True, False])
def test_the_text_has_exactly_the_targets_distribution(replaced):
    for seed in range(6):
        out, p = joint(seed, drawn_with_replacement=replaced, judged_with_replacement=replaced)
        assert abs(out.sum() - 1) < 1e-12
        assert bias(out, p) < 1e-12


def test_siblings_drawn_without_replacement_and_judged_with_it_are_found_out():
    found = [
        bias(*joint(seed, drawn_with_replacement=False, judged_with_replacement=True)) for seed in range(6)
    ]
    assert max(found) > 0.02


def test_the_best_siblings_treated_as_if_they_were_drawn_are_found_out():
    def best_two(q):
        return tuple(np.argsort(-q[0])[:2])

    found = [
        bias(*joint(s, drawn_with_replacement=False, judged_with_replacement=False, drafts_of=best_two))
        for s in range(6)
    ]
    assert max(found) > 0.1
