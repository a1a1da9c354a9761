"""Each layer computes the equations of its family, as a numpy float64 loop over tokens computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mambacache_jax.models import PlainContext, weights
from mambacache_jax.models.layers import (
    Attention,
    GatedDeltaNet,
    GatedRMSNorm,
    KimiDeltaAttention,
    Linear,
    Mamba2,
    MTPBlock,
    RMSNorm,
    SwiGLU,
    rotate,
)
from mambacache_jax.models.layers.attention import FrozenAttention

ROWS, LENGTH, SIZE = 2, 21, 12


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0, x)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def unit_rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def unit_length(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def causal_conv(raw, weight, bias):
    """`[length, channel]`, one token and tap at a time."""
    width, out = weight.shape[1], np.zeros_like(raw)
    for t in range(len(raw)):
        for tap in range(width):
            if (past := t - (width - 1) + tap) >= 0:
                out[t] += weight[:, tap] * raw[past]
    return silu(out + bias)


def turned(x, position, base, dim):
    """Rotates pairs `(i, i + dim / 2)` of the last axis, as complex numbers."""
    half = dim // 2
    angle = position * float(base) ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:dim]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag, x[..., dim:]], -1)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def perturbed(module, rng, scale=0.3):
    """Moves every parameter off its first value, so that ones and zeros hide nothing."""
    graphdef, params = nnx.split(module)
    params = jax.tree.map(lambda p: p + jnp.asarray(scale * rng.normal(size=p.shape), p.dtype), params)
    names = dict(zip(weights.names(params), jax.tree.leaves(params), strict=True))
    return nnx.merge(graphdef, params), {name: np.asarray(leaf, np.float64) for name, leaf in names.items()}


def inputs(rng):
    x = rng.normal(size=(ROWS, LENGTH, SIZE)).astype(np.float32)
    return jnp.asarray(x.reshape(ROWS * LENGTH, SIZE)), x.astype(np.float64)


def check(layer, oracle, rng, implementation=None):
    """The layer on two rows, in blocks of 8 tokens, against the oracle on each row."""
    layer, p = perturbed(layer, rng)
    flat, rows = inputs(rng)

    @jax.jit
    def run(flat):
        ctx = PlainContext((layer.spec,), ROWS, LENGTH, block_tokens=8, implementation=implementation)
        return layer(flat, ctx, 0)

    got = np.asarray(run(flat)).reshape(ROWS, LENGTH, SIZE)
    want = np.stack([oracle(p, row) for row in rows])
    np.testing.assert_allclose(got, want, atol=3e-5 * np.abs(want).max())


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize(
    ("groups", "norm", "gate_first", "bias"),
    [(2, True, True, True), (4, True, False, False), (1, False, True, True)],
)
def test_mamba2(rng, groups, norm, gate_first, bias, implementation):
    heads, head_dim, state_dim = 4, 6, 5

    def oracle(p, x):
        inner, grouped = heads * head_dim, groups * state_dim
        z, raw, dt = np.split(x @ p["in_proj.weight"], [inner, 2 * inner + 2 * grouped], axis=-1)
        conv = causal_conv(raw, p["conv.weight"], p["conv.bias"] if bias else 0.0)
        out, state = [], np.zeros((heads, head_dim, state_dim))
        for t in range(len(x)):
            v, b, c = np.split(conv[t], [inner, inner + grouped])
            v, b, c = v.reshape(heads, head_dim), b.reshape(groups, -1), c.reshape(groups, -1)
            y = np.zeros((heads, head_dim))
            for h in range(heads):
                g = h // (heads // groups)
                delta = softplus(dt[t, h] + p["dt_bias"][h])
                state[h] = np.exp(-delta * np.exp(p["a_log"][h])) * state[h] + np.outer(delta * v[h], b[g])
                y[h] = state[h] @ c[g] + p["skip"][h] * v[h]
            y, gate = y.reshape(-1), silu(z[t])
            if norm:
                y = y * gate if gate_first else y
                y = unit_rms(y.reshape(groups, -1), 1e-5).reshape(-1) * p["norm.weight"]
                y = y if gate_first else y * gate
            else:
                y = y * gate
            out.append(y @ p["out_proj.weight"])
        return np.stack(out)

    layer = Mamba2(
        SIZE,
        num_heads=heads,
        head_dim=head_dim,
        state_dim=state_dim,
        num_groups=groups,
        conv_bias=bias,
        norm=norm,
        gate_first=gate_first,
        rngs=nnx.Rngs(1),
    )
    check(layer, oracle, rng, implementation)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize(("key_heads", "width", "beta_scale"), [(2, 4, 1.0), (4, 3, 2.0)])
def test_gated_delta_net(rng, key_heads, width, beta_scale, implementation):
    heads, key_dim, value_dim = 4, 5, 6

    def oracle(p, x):
        keys, values = key_heads * key_dim, heads * value_dim
        ends = np.cumsum([2 * keys + values, values, heads])
        raw, z, b, a = np.split(x @ p["in_proj.weight"], ends, axis=-1)
        conv = causal_conv(raw, p["conv.weight"], 0.0)
        out, state = [], np.zeros((heads, key_dim, value_dim))
        for t in range(len(x)):
            q, k, v = np.split(conv[t], [keys, 2 * keys])
            q = unit_length(q.reshape(key_heads, -1)) / np.sqrt(key_dim)
            k, v = unit_length(k.reshape(key_heads, -1)), v.reshape(heads, -1)
            y = np.zeros((heads, value_dim))
            for h in range(heads):
                kh = h // (heads // key_heads)
                state[h] *= np.exp(-np.exp(p["a_log"][h]) * softplus(a[t, h] + p["dt_bias"][h]))
                error = beta_scale * sigmoid(b[t, h]) * (v[h] - state[h].T @ k[kh])
                state[h] += np.outer(k[kh], error)
                y[h] = state[h].T @ q[kh]
            y = unit_rms(y, 1e-6) * p["norm.weight"] * silu(z[t].reshape(heads, -1))
            out.append(y.reshape(-1) @ p["out_proj.weight"])
        return np.stack(out)

    layer = GatedDeltaNet(
        SIZE,
        num_key_heads=key_heads,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=width,
        beta_scale=beta_scale,
        rngs=nnx.Rngs(1),
    )
    check(layer, oracle, rng, implementation)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize(("heads", "rank"), [(1, None), (3, 2)])
def test_kimi_delta_attention(rng, heads, rank, implementation):
    dim = 6

    def oracle(p, x):
        inner, width = heads * dim, rank or dim
        ends = np.cumsum([3 * inner, heads, width])
        raw, b, f, g = np.split(x @ p["in_proj.weight"], ends, axis=-1)
        conv = causal_conv(raw, p["conv.weight"], 0.0)
        decay = softplus(f @ p["decay.weight"] + p["dt_bias"]).reshape(-1, heads, dim)
        gate = sigmoid(g @ p["gate.weight"]).reshape(-1, heads, dim)
        out, state = [], np.zeros((heads, dim, dim))
        for t in range(len(x)):
            q, k, v = conv[t].reshape(3, heads, dim)
            q, k = unit_length(q) / np.sqrt(dim), unit_length(k)
            y = np.zeros((heads, dim))
            for h in range(heads):
                state[h] = np.diag(np.exp(-np.exp(p["a_log"][h]) * decay[t, h])) @ state[h]
                state[h] += np.outer(k[h], sigmoid(b[t, h]) * (v[h] - state[h].T @ k[h]))
                y[h] = state[h].T @ q[h]
            y = unit_rms(y, 1e-5) * p["norm.weight"] * gate[t]
            out.append(y.reshape(-1) @ p["out_proj.weight"])
        return np.stack(out)

    layer = KimiDeltaAttention(SIZE, num_heads=heads, head_dim=dim, rank=rank, rngs=nnx.Rngs(1))
    check(layer, oracle, rng, implementation)


@pytest.mark.parametrize(
    ("kv_heads", "options"),
    [
        (2, {}),
        (1, {"rope_base": None, "scale": 0.7, "v_head_dim": 6}),
        (4, {"rotary_dim": 4, "qk_norm": True, "unit_offset": True, "output_gate": True}),
        (2, {"qk_norm": True, "rope_base": 50.0, "v_head_dim": 4, "output_gate": True}),
    ],
)
def test_attention(rng, kv_heads, options):
    heads, dim = 4, 8
    v_dim, base = options.get("v_head_dim", dim), options.get("rope_base", 10_000.0)

    def prepared(p, x, name, position):
        if options.get("qk_norm"):
            factor = p[f"{name}_norm.weight"] + (1 if options.get("unit_offset") else 0)
            x = unit_rms(x, 1e-6) * factor
        return x if base is None else turned(x, position, base, options.get("rotary_dim", dim))

    def oracle(p, x):
        q, k, v, gate = np.split(
            x @ p["qkv.weight"],
            np.cumsum([heads * dim, kv_heads * dim, kv_heads * v_dim]),
            axis=-1,
        )
        q, k, v = q.reshape(-1, heads, dim), k.reshape(-1, kv_heads, dim), v.reshape(-1, kv_heads, v_dim)
        q, k = (
            np.stack([prepared(p, m[t], name, t) for t in range(len(x))]) for name, m in (("q", q), ("k", k))
        )
        out = []
        for t in range(len(x)):
            y = np.zeros((heads, v_dim))
            for h in range(heads):
                kv = h // (heads // kv_heads)
                scores = k[: t + 1, kv] @ q[t, h] * options.get("scale", dim**-0.5)
                y[h] = softmax(scores) @ v[: t + 1, kv]
            y = y.reshape(-1)
            out.append((y * sigmoid(gate[t]) if options.get("output_gate") else y) @ p["out.weight"])
        return np.stack(out)

    layer = Attention(SIZE, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rngs=nnx.Rngs(1), **options)
    check(layer, oracle, rng)


def test_mtp_block_reads_frozen_keys_and_values(rng):
    heads, kv_heads, dim, positions = 4, 2, 8, np.array([6, 3, 0], np.int32)
    attention = FrozenAttention(SIZE, num_heads=heads, head_dim=dim, rngs=nnx.Rngs(1))
    block, p = perturbed(MTPBlock(SIZE, attention=attention, mlp_size=10, rngs=nnx.Rngs(1)), rng)
    embedded, hidden = rng.normal(size=(2, 3, SIZE))
    k, v = rng.normal(size=(2, 7, kv_heads, dim))
    queries = []

    def attend(q, scale):
        queries.append(np.asarray(q, np.float64))
        out = np.zeros((3, heads, dim))
        for row, t in enumerate(positions):
            for h in range(heads):
                kv = h // (heads // kv_heads)
                weight = softmax(k[: t + 1, kv] @ queries[-1][row, h] * scale)
                out[row, h] = weight @ v[: t + 1, kv]
        return jnp.asarray(out, jnp.float32)

    got = block(
        jnp.asarray(embedded, jnp.float32), jnp.asarray(hidden, jnp.float32), jnp.asarray(positions), attend
    )

    def norm(x, name):
        return unit_rms(x, 1e-6) * p[f"{name}.weight"]

    x = np.concatenate([norm(embedded, "embedding_norm"), norm(hidden, "hidden_norm")], -1) @ p["fuse.weight"]
    q = (norm(x, "attention_norm") @ p["attention.q.weight"]).reshape(3, heads, dim)
    q = np.stack([turned(q[row], t, 10_000.0, dim) for row, t in enumerate(positions)])
    np.testing.assert_allclose(queries[0], q, atol=1e-5)
    read = np.asarray(attend(jnp.asarray(q), dim**-0.5), np.float64).reshape(3, -1)
    x = x + read @ p["attention.out.weight"]
    gate, up = np.split(norm(x, "mlp_norm") @ p["mlp.gate_up.weight"], 2, axis=-1)
    x = x + (silu(gate) * up) @ p["mlp.down.weight"]
    np.testing.assert_allclose(np.asarray(got), norm(x, "norm"), atol=1e-4)


def test_swiglu_gates_with_the_first_half(rng):
    layer, p = perturbed(SwiGLU(SIZE, 7, rngs=nnx.Rngs(1)), rng)
    flat, rows = inputs(rng)
    gate, up = np.split(rows.reshape(-1, SIZE) @ p["gate_up.weight"], 2, axis=-1)
    np.testing.assert_allclose(layer(flat), (silu(gate) * up) @ p["down.weight"], atol=1e-4)


def test_linear_adds_its_bias(rng):
    layer, p = perturbed(Linear(SIZE, 3, bias=True, rngs=nnx.Rngs(1)), rng)
    flat, rows = inputs(rng)
    want = rows.reshape(-1, SIZE) @ p["weight"] + p["bias"]
    np.testing.assert_allclose(layer(flat), want, atol=1e-5)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms_round_once_from_float32(rng, unit_offset):
    """In bfloat16 the norm is that of the same values in float32, rounded at the end."""
    layer, p = perturbed(RMSNorm(SIZE, unit_offset=unit_offset), rng)
    x = jnp.asarray(rng.normal(size=(5, SIZE)), jnp.bfloat16)
    want = unit_rms(np.asarray(x, np.float64), 1e-6) * (p["weight"] + unit_offset)
    got = layer(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-30)


def test_norm_groups_must_divide_the_channels():
    with pytest.raises(ValueError, match="3 groups"):
        GatedRMSNorm(8, num_groups=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: Attention(8, num_heads=3, num_kv_heads=2, head_dim=4, rngs=rngs),
        lambda rngs: Mamba2(8, num_heads=3, head_dim=4, state_dim=4, num_groups=2, rngs=rngs),
        lambda rngs: GatedDeltaNet(8, num_key_heads=2, num_heads=3, key_dim=4, value_dim=4, rngs=rngs),
    ],
)
def test_heads_that_do_not_split_evenly_are_refused(make):
    with pytest.raises(ValueError, match=r"3 .*heads do not"):
        make(nnx.Rngs(0))


def test_rotation_depends_on_the_distance_alone(rng):
    x = jnp.asarray(rng.normal(size=(2, 1, 8)), jnp.float32)

    def product(first, second):
        y = rotate(x, jnp.array([first, second], jnp.int32), base=10_000.0)
        return float((y[0] * y[1]).sum())

    assert product(3, 7) == pytest.approx(product(103, 107), abs=1e-4)
    assert product(3, 7) != pytest.approx(product(3, 8), abs=1e-2)
