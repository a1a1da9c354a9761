"""Mixtures of experts and latent attention compute what numpy float64 loops over tokens compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mambacache_jax.models import PlainContext, weights
from mambacache_jax.models.layers import LatentAttention, Linear, MoE, Router, SquaredReLU, SwiGLU

TOKENS, SIZE, HIDDEN, EXPERTS, CHOSEN = 23, 12, 10, 8, 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def perturbed(module, scale=0.3):
    """Moves every parameter off its first value, and gives them by name in float64."""
    random = np.random.default_rng(5)
    graphdef, params = nnx.split(module)
    params = jax.tree.map(lambda p: p + jnp.asarray(scale * random.normal(size=p.shape), p.dtype), params)
    names = dict(zip(weights.names(params), jax.tree.leaves(params), strict=True))
    return nnx.merge(graphdef, params), {name: np.asarray(leaf, np.float64) for name, leaf in names.items()}


@pytest.fixture
def x():
    return np.random.default_rng(4).normal(size=(TOKENS, SIZE)).astype(np.float32)


def choose(p, x, options):
    """`(expert, weight)` pairs of one token."""
    logits = x @ p["router.weight"]
    kind = options["scores"]
    if kind == "softmax_of_best":
        best = np.argsort(-logits)[:CHOSEN]
        return zip(best, softmax(logits[best]), strict=True)
    score = softmax(logits) if kind == "softmax" else sigmoid(logits)
    choice = score + p.get("router.bias", 0)
    groups = options.get("num_groups", 1)
    if groups > 1:
        grouped = choice.reshape(groups, -1)
        of_group = np.sort(grouped, axis=1)[:, -2:].sum(axis=1)
        allowed = np.argsort(-of_group)[: options["num_chosen_groups"]]
        outside = np.repeat(~np.isin(np.arange(groups), allowed), grouped.shape[1])
        choice = np.where(outside, -np.inf, choice)
    best = np.argsort(-choice)[:CHOSEN]
    weight = score[best] / (score[best].sum() if options.get("normalised", True) else 1)
    return zip(best, weight * options.get("factor", 1.0), strict=True)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"scores": "softmax_of_best"},
        {"scores": "softmax", "normalised": False},
        {"scores": "sigmoid", "bias": True, "num_groups": 4, "num_chosen_groups": 2, "factor": 2.5},
    ],
)
def test_each_token_is_the_weighted_sum_of_its_own_experts(x, options, gated):
    rngs = nnx.Rngs(1)
    router = Router(SIZE, num_experts=EXPERTS, num_chosen=CHOSEN, **options, rngs=rngs)
    layer, p = perturbed(MoE(SIZE, HIDDEN, router, gated=gated, rngs=rngs))
    want = np.zeros((TOKENS, SIZE))
    for token in range(TOKENS):
        for expert, weight in choose(p, x[token].astype(np.float64), options):
            inside = x[token] @ p["first"][expert]
            if gated:
                gate, up = np.split(inside, 2)
                inside = gate * sigmoid(gate) * up
            else:
                inside = np.maximum(inside, 0) ** 2
            want[token] += weight * (inside @ p["last"][expert])
    np.testing.assert_allclose(jax.jit(layer)(jnp.asarray(x)), want, atol=3e-5 * np.abs(want).max())


def test_shared_experts_and_narrow_channels_go_around_the_routed_ones(x):
    rngs = nnx.Rngs(2)
    router = Router(SIZE, num_experts=2, num_chosen=1, scores="sigmoid", rngs=rngs)
    layer = MoE(
        6,
        HIDDEN,
        router,
        gated=False,
        shared=SwiGLU(SIZE, 7, rngs=rngs),
        shared_gate=Linear(SIZE, 1, rngs=rngs),
        narrow=Linear(SIZE, 6, rngs=rngs),
        widen=Linear(6, SIZE, rngs=rngs),
        rngs=rngs,
    )
    layer, p = perturbed(layer)
    gate, up = np.split(x @ p["shared.gate_up.weight"], 2, axis=-1)
    shared = (gate * sigmoid(gate) * up) @ p["shared.down.weight"]
    want = shared * sigmoid(x @ p["shared_gate.weight"])
    chosen = (x @ p["router.weight"]).argmax(-1)
    for token in range(TOKENS):
        narrow = x[token] @ p["narrow.weight"]
        routed = np.maximum(narrow @ p["first"][chosen[token]], 0) ** 2 @ p["last"][chosen[token]]
        want[token] += routed @ p["widen.weight"]
    np.testing.assert_allclose(jax.jit(layer)(jnp.asarray(x)), want, atol=3e-5 * np.abs(want).max())


def test_other_tokens_do_not_change_a_tokens_experts(x):
    """Bit for bit, in a batch of the same size: also beside NaN, which padding may hold."""
    rngs = nnx.Rngs(3)
    router = Router(SIZE, num_experts=EXPERTS, num_chosen=CHOSEN, scores="softmax", rngs=rngs)
    layer = jax.jit(MoE(SIZE, HIDDEN, router, rngs=rngs))
    before = np.asarray(layer(jnp.asarray(x)))
    other = np.random.default_rng(8).normal(size=x.shape).astype(np.float32)
    other[:5], other[7] = x[:5], np.nan
    after = np.asarray(layer(jnp.asarray(other)))
    assert np.array_equal(before[:5], after[:5])
    moved = np.asarray(layer(jnp.asarray(np.roll(x, 9, axis=0))))
    assert np.array_equal(before, np.roll(moved, -9, axis=0))


def test_squared_relu(x):
    layer, p = perturbed(SquaredReLU(SIZE, HIDDEN, bias=True, rngs=nnx.Rngs(1)))
    inside = np.maximum(x @ p["up.weight"] + p["up.bias"], 0) ** 2
    want = inside @ p["down.weight"] + p["down.bias"]
    np.testing.assert_allclose(layer(jnp.asarray(x)), want, atol=1e-4)


def test_latent_attention_is_attention_with_a_key_and_a_value_a_head(x):
    """The oracle makes every head's keys and values; the layer keeps the latent alone."""
    heads, latent, key, shared, value = 3, 8, 5, 4, 6
    layer = LatentAttention(
        SIZE,
        num_heads=heads,
        latent_dim=latent,
        key_dim=key,
        shared_dim=shared,
        value_dim=value,
        rngs=nnx.Rngs(1),
    )
    layer, p = perturbed(layer)
    ctx = PlainContext((layer.spec,), 1, TOKENS)
    got = layer(jnp.asarray(x), ctx, 0)
    assert ctx.kv[0][0].shape == (TOKENS, 1, latent + shared)

    q = (x @ p["query.weight"]).reshape(TOKENS, heads, key + shared)
    down = x @ p["down.weight"]
    c = down[:, :latent] / np.sqrt((down[:, :latent] ** 2).mean(-1, keepdims=True) + 1e-6) * p["norm.weight"]
    want = np.zeros((TOKENS, SIZE))
    for t in range(TOKENS):
        out = []
        for h in range(heads):
            k = np.concatenate([c[: t + 1] @ p["key_up"][h].T, down[: t + 1, latent:]], axis=-1)
            v = c[: t + 1] @ p["value_up"][h].T
            out.append(softmax(k @ q[t, h] * (key + shared) ** -0.5) @ v)
        want[t] = np.concatenate(out) @ p["out.weight"]
    np.testing.assert_allclose(got, want, atol=3e-5 * np.abs(want).max())
