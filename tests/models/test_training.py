"""Training reads whole files, holds some out, and what it writes is what it measures."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

from mambacache_jax.models import weights
from mambacache_jax.models.tiny import TinyConfig, TinyLM, as_model, train
from mambacache_jax.models.tiny.corpus import is_held_out, read_corpus, windows
from mambacache_jax.models.tiny.evaluate import all_logits, losses
from mambacache_jax.models.tiny.optimiser import optimiser, orthogonalised


@pytest.fixture
def library(tmp_path):
    """A folder like a standard library, of 40 modules and some tests."""
    root = tmp_path / "lib"
    for number in range(40):
        path = root / "pkg" / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x = %d\0\n" % number)
    (root / "test").mkdir()
    (root / "test" / "t.py").write_bytes(b"secret")
    return root


def test_files_are_split_by_name_and_end_with_the_separator(library):
    corpus = read_corpus(library)
    held_out = [n for n in range(40) if is_held_out(f"pkg/m{n}.py")]
    assert 0 < len(held_out) < 40
    assert corpus.num_held_out_files == len(held_out)
    assert corpus.num_train_files == 40 - len(held_out)
    parts = bytes(corpus.held_out).split(b"\0")
    assert sorted(parts) == sorted([b"", *(b"x = %d\n" % n for n in held_out)])
    assert b"secret" not in bytes(corpus.train) + bytes(corpus.held_out)


def test_windows_cover_the_text_evenly():
    assert windows(np.arange(10, dtype=np.uint8), 3, 4).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="fewer than one window"):
        windows(np.arange(3, dtype=np.uint8), 1, 4)


def test_the_learning_rate_rises_and_falls_to_zero():
    rates = [train.learning_rate(x, 1.0) for x in np.linspace(0, 1, 101)]
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) == 3
    assert rates[0] < 0.05
    assert rates[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("shape", [(6, 17), (17, 6)])
def test_orthogonalised_updates_have_nearly_equal_singular_values(shape):
    update = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    got = np.asarray(orthogonalised(jnp.asarray(update)))
    values = np.linalg.svd(got, compute_uv=False) / (0.2 * 17**0.5)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (got * update).sum() > 0


@pytest.fixture
def small(monkeypatch):
    """A network that compiles in a second, and the promotion that optax needs."""
    config = TinyConfig(layers=("attention",), size=16, mlp_size=24, num_heads=2, num_kv_heads=1, head_dim=8)
    monkeypatch.setattr(train, "TinyConfig", lambda: config)
    with jax.numpy_dtype_promotion("standard"):
        yield config


def test_inner_matrices_alone_are_orthogonalised(small):
    params = nnx.split(TinyLM(small, nnx.Rngs(0)))[1]
    transform = optimiser(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(transform.update)(gradients, jax.jit(transform.init)(params), zeros)
    by_name = dict(zip(weights.names(params), jax.tree.leaves(updates), strict=True))
    adam = [name for name, update in by_name.items() if np.allclose(np.abs(update), 1.0, atol=1e-3)]
    assert {"embedding.weight", "head.weight", "layers.0.mixer_norm.weight"} <= set(adam)
    assert not any("qkv" in name or "mlp.down" in name or "fuse" in name for name in adam)


def test_updates_reduce_the_loss(small):
    network = TinyLM(small, nnx.Rngs(0))
    graphdef, params = nnx.split(network)
    model, transform = as_model(network, params, graphdef), optimiser(params)
    text = windows(np.frombuffer(b"for key in sorted(table):\n    print(key)\n" * 8, np.uint8), 4, 67)

    def loss(params):
        return losses(all_logits(model, params, jnp.asarray(text)), jnp.asarray(text)).sum()

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = transform.update(gradients, state, params)
        return jax.tree.map(lambda p, u: p - 0.01 * u, params, updates), state, value

    state, values = jax.jit(transform.init)(params), []
    for _ in range(60):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]


def test_a_run_writes_weights_and_their_record(small, tmp_path):
    arguments = ["--minutes", "0.02", "--batch-bytes", "1024", "--long-share", "0", "--out", str(tmp_path)]
    result = CliRunner().invoke(train.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads((tmp_path / "training_record.json").read_text())
    assert record["steps"] * 1024 == record["bytes_seen"] > 0
    assert np.isfinite(record["bits_per_byte"])
    assert record["file_bytes"] == (tmp_path / "tiny.safetensors").stat().st_size
    weights.load(tmp_path / "tiny.safetensors", nnx.split(TinyLM(small, nnx.Rngs(0)))[1])


def test_a_batch_that_is_no_whole_number_of_windows_is_refused(tmp_path):
    result = CliRunner().invoke(train.main, ["--batch-bytes", "1000", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "multiple of 1024" in result.output
