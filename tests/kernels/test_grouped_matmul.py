"""Every implementation multiplies each row by its own group's matrix, and "blocks" holds nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.blocks import block_rows

SIZES = [
    [3, 0, 5, 1],
    [0, 0, 9, 0],
    [9, 0, 0, 0],
    [0, 0, 0, 9],
    [1, 1, 0, 0],
    [1],
    [40, 0, 37, 130],
    [200, 1, 1, 1],
]


def case(sizes, dtype=jnp.float32):
    random = np.random.default_rng(3)
    x = jnp.asarray(random.normal(size=(sum(sizes), 6)), dtype)
    weight = jnp.asarray(random.normal(size=(len(sizes), 6, 5)), dtype)
    return x, weight, jnp.asarray(sizes, jnp.int32)


@pytest.mark.parametrize("implementation", [None, "blocks", "ragged_dot", "reference"])
@pytest.mark.parametrize("sizes", SIZES)
def test_each_row_meets_the_matrix_of_its_group(sizes, implementation):
    x, weight, groups = case(sizes)
    got = grouped_matmul(x, weight, groups, implementation=implementation)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    want = np.einsum("ri,rio->ro", np.asarray(x, np.float64), np.asarray(weight, np.float64)[owner])
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_bfloat16_stays_bfloat16():
    x, weight, groups = case([3, 6], jnp.bfloat16)
    got = grouped_matmul(x, weight, groups)
    assert got.dtype == jnp.bfloat16
    want = grouped_matmul(x, weight, groups, implementation="reference")
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7, atol=2**-7)


def test_a_groups_garbage_stays_in_its_rows():
    """NaN in one group's rows and matrix reaches no other group, though blocks overlap."""
    x, weight, groups = case([20, 13, 20])
    clean = grouped_matmul(x, weight, groups)
    x, weight = x.at[20:33].set(jnp.nan), weight.at[1].set(jnp.nan)
    got = np.asarray(grouped_matmul(x, weight, groups))
    others = np.r_[0:20, 33:53]
    assert np.array_equal(got[others], np.asarray(clean)[others])
    assert np.isnan(got[20:33]).all()


def test_beside_the_result_there_is_little_memory():
    """A prefill of a model of 512 experts: XLA's own op on a CPU would need a copy of x for each."""
    rows, groups, size, out = 40_960, 512, 2048, 1024
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((rows, size), jnp.float32),
            ((groups, size, out), jnp.float32),
            ((groups,), jnp.int32),
        )
    ]
    compiled = jax.jit(grouped_matmul).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.5 * rows * out * 4


@pytest.mark.parametrize(
    ("rows", "groups", "block"), [(8, 512, 8), (3, 4, 3), (40_960, 512, 32), (100, 8, 8), (9000, 8, 64)]
)
def test_a_block_is_at_most_half_an_average_group_within_bounds(rows, groups, block):
    assert block_rows(rows, groups) == block


def test_an_unknown_implementation_is_refused():
    x, weight, groups = case([3, 6])
    with pytest.raises(ValueError, match="unknown implementation 'fast'"):
        grouped_matmul(x, weight, groups, implementation="fast")
