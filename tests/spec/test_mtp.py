"""The frozen head drafts as defined: it reads the target's K and V, stays at one position, writes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mambacache_jax.host.draft_tree import check_tree, select_best
from mambacache_jax.spec import DeviceDraft, MTPDraft
from mambacache_jax.spec.mtp import pool_size

from .rounds import DEPTH, NODES, PAGE, ROWS, START, Run, plain_texts, round_program, small_model, start

VOCAB = 7


def toy_step(params, tokens, hidden, positions, attend):
    """A step whose result tells what it was given."""
    del attend
    return jnp.stack(
        [jnp.sin(3.0 * hidden[:, 0] + 1.7 * tokens.astype(jnp.float32)), positions.astype(jnp.float32)],
        axis=1,
    )


def toy_head(params, hidden):
    return jnp.sin(
        hidden[..., :1] * jnp.arange(1.0, 2 * VOCAB, 2.0).reshape((1,) * (hidden.ndim - 1) + (-1,))
        + hidden[..., 1:]
    )


def drafted_by_hand(bonus, hidden, kv_len, topk, steps):
    """Tokens, parents and log-probabilities of all candidates of one row."""

    def best(hidden):
        logits = np.asarray(toy_head(None, hidden[None]), np.float64)[0]
        log_probs = logits - np.log(np.exp(logits).sum())
        token = np.argsort(-log_probs, kind="stable")[:topk]
        return token, log_probs[token]

    def forward(token, hidden):
        return np.array([np.sin(3.0 * hidden[0] + 1.7 * token), kv_len - 1], np.float32)

    first = forward(bonus, hidden)
    token, log_prob = best(first)
    tokens, parent, own = list(token), [-1] * topk, list(log_prob)
    frontier = [(n, first, log_prob[n]) for n in range(topk)]
    for _ in range(1, steps):
        group = []
        for node, before, rank in frontier:
            after = forward(tokens[node], before)
            token, log_prob = best(after)
            for t, p in zip(token, log_prob, strict=True):
                group.append((len(tokens), after, rank + p))
                tokens.append(t)
                parent.append(node)
                own.append(p)
        frontier = sorted(group, key=lambda entry: -entry[2])[:topk]
    return np.array(tokens), np.array(parent), np.array(own)


@pytest.mark.parametrize(("topk", "steps", "num_nodes"), [(1, 4, 5), (3, 3, 9), (2, 4, 15)])
def test_the_tree_is_the_best_of_what_was_drafted(topk, steps, num_nodes):
    draft = MTPDraft(toy_step, toy_head, 0, PAGE, steps, topk, num_nodes)
    assert isinstance(draft, DeviceDraft)
    hidden = np.array([[0.3, 0.0], [0.8, 1.0], [-0.4, 2.0]], np.float32)
    bonus, kv_len = np.array([2, 5, 1], np.int32), np.array([6, 9, 12], np.int32)
    row = np.array([1, 2, 3], np.int32)
    tree = jax.device_get(jax.jit(draft.propose)(None, start(), row, bonus, hidden, kv_len))
    for r in range(3):
        tokens, parent, own = drafted_by_hand(bonus[r], hidden[r], kv_len[r], topk, steps)
        assert len(tokens) == pool_size(topk, steps)
        kept, of_kept = select_best(parent, own, num_nodes - 1)
        assert tree.tokens[r].tolist() == [bonus[r], *tokens[kept]]
        assert tree.parent[r].tolist() == [-1, *(of_kept + 1)]
        check_tree(tree.parent[r], rooted=True, depth=draft.depth)


def test_rows_without_a_context_or_a_request_have_no_drafts():
    draft = MTPDraft(toy_step, toy_head, 0, PAGE, 2, 1, 3)
    arrays = np.array([0, 3, 2], np.int32), np.ones(3, np.int32), np.zeros((3, 2), np.float32)
    tree = jax.jit(draft.propose)(None, start(), *arrays, np.array([0, 0, 9], np.int32))
    assert tree.node_len.tolist() == [0, 1, 3]


def test_sixty_four_nodes_need_more_than_four_branches_in_three_steps():
    assert pool_size(4, 3) == 36
    for fields, why in [((3, 4, 64), "37"), ((0, 4, 2), "steps=0"), ((3, 1, 5), r"\[2, 4\]")]:
        with pytest.raises(ValueError, match=why):
            MTPDraft(toy_step, toy_head, 0, PAGE, *fields)


def mtp(steps, topk, num_nodes):
    model = small_model()
    return MTPDraft(model.mtp_step, model.logits, 0, PAGE, steps, topk, num_nodes)


def test_a_step_attends_to_the_committed_tokens_and_to_nothing_else():
    model, pools = small_model(), start()
    hidden = np.random.default_rng(4).standard_normal((1, 32)).astype(np.float32)
    row, bonus, kv_len = np.array([2], np.int32), np.array([9], np.int32), np.array([START[1]], np.int32)
    tree = jax.jit(mtp(3, 1, 4).propose)(model.params, pools, row, bonus, hidden, kv_len)

    @jax.jit
    def by_hand(params, k, v, token, hidden):
        def attend(q, scale):
            scores = jnp.einsum("nhd,td->nht", q * scale, k[:, 0], precision="highest")
            return jnp.einsum("nht,tv->nhv", jax.nn.softmax(scores), v[:, 0], precision="highest")

        hidden = model.mtp_step(params, token, hidden, jnp.array([START[1] - 1], jnp.int32), attend)
        return hidden, jnp.argmax(model.logits(params, hidden), axis=-1).astype(jnp.int32)

    at = np.arange(START[1])
    slots = pools.table.pages[2][at // PAGE] * PAGE + at % PAGE
    k, v, token = pools.kv.k[0][slots], pools.kv.v[0][slots], bonus
    for node in range(1, 4):
        hidden, token = by_hand(model.params, k, v, token, hidden)
        assert tree.tokens[0, node] == token[0]


def test_text_with_its_drafts_is_that_of_plain_decoding():
    draft = mtp(3, 2, NODES)

    @functools.partial(jax.jit, static_argnames=("mode", "interval"))
    def program(params, pools, pending, plan, tree, *args, mode, interval):
        kv_len = jnp.where(plan.read_slot != 0, pools.ssm.position[plan.read_slot], 0)
        kv_len = kv_len + pending.length[plan.row]
        hidden = jnp.sin(jnp.arange(32.0))[None] * jnp.ones((ROWS, 1))
        drafts = draft.propose(params, pools, plan.row, tree.tokens[:, 0], hidden, kv_len)
        return round_program.__wrapped__(
            params, pools, pending, plan, drafts, *args, mode=mode, interval=interval
        )

    assert draft.depth == DEPTH
    run = Run(program=program)
    for _ in range(6):
        run.round()
    assert all(run.texts[r] == list(plain_texts(0.0)[r][: len(run.texts[r])]) for r in range(ROWS))
