"""Parameters survive the file, and a file that does not fit says everything that is wrong at once."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from mambacache_jax.models import weights
from mambacache_jax.models.layers import Linear, RMSNorm


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Linear(3, 4, bias=True, rngs=rngs), Linear(4, 2, rngs=rngs)])
        self.norm = RMSNorm(4)


@pytest.fixture
def params():
    values = nnx.split(Pair(nnx.Rngs(0)))[1]
    return jax.tree.map(lambda leaf: leaf + 0.1, values)


def test_names_are_paths_in_the_module(params):
    assert weights.names(params) == ["layers.0.bias", "layers.0.weight", "layers.1.weight", "norm.weight"]


def test_float32_comes_back_bit_for_bit(params, tmp_path):
    weights.save(tmp_path / "w.safetensors", params)
    loaded = weights.load(tmp_path / "w.safetensors", jax.eval_shape(lambda: params))
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        assert after.dtype == jnp.float32
        assert np.array_equal(before, after)


def test_bfloat16_rounds_matrices_and_leaves_vectors_alone(params, tmp_path):
    weights.save(tmp_path / "w.safetensors", params, dtype="bfloat16")
    loaded = weights.load(tmp_path / "w.safetensors", params)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        rounded = np.asarray(before).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert after.dtype == jnp.float32
        assert np.array_equal(after, rounded if before.ndim > 1 else before)


def test_one_error_lists_every_tensor_that_does_not_fit(params, tmp_path):
    path = tmp_path / "w.safetensors"
    weights.save(path, params)
    tensors = safetensors.numpy.load_file(path)
    del tensors["layers.0.bias"]
    tensors["layers.7.weight"] = np.zeros((2, 2), np.float32)
    tensors["layers.1.weight"] = np.zeros((2, 4), np.float32)
    tensors["norm.weight"] = np.zeros((4,), np.float16)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(ValueError, match="does not fit the model") as error:
        weights.load(path, params)
    for part in (
        "missing layers.0.bias (4,)",
        "unknown layers.7.weight (2, 2)",
        "layers.1.weight has shape (2, 4), not (4, 2)",
        "norm.weight is float16, not bfloat16 or float32",
        str(path),
    ):
        assert part in str(error.value)
