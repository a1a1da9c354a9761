"""`ssm_scan` is the recurrence, in both implementations: on ragged rows, at any length, decay and grouping.

Every product and sum is float32, with a relative rounding error of 6e-8 each. An output is a sum of about a
hundred of them, which add like a random walk, and the delta rules solve a system that amplifies them a few
times: 2e-6 of the largest value holds them all, and one product in bfloat16 or TF32 (4e-3, 5e-4) breaks it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.blocks import cut_rows
from kernels_pallas.ssm_nodes import Inputs, NodesPlan, ssm_nodes
from kernels_pallas.ssm_scan import ssm_scan

KINDS = ("mamba2", "gdn", "kda")
IMPLEMENTATIONS = ("xla", "reference")
TOLERANCE = 2e-6
# One set of shapes for what is asked of many calls: three rows in seven blocks of 16, two exports a row.
LENGTHS, NUM_BLOCKS, NO_EXPORTS = [39, 16, 20], 7, [[0, 0]] * 3


def assert_close(got, want, tolerance=TOLERANCE):
    got, want = (np.concatenate([np.ravel(x) for x in xs]) for xs in (got, want))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [(1, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_follow_the_recurrence(problem, kind, heads, implementation):
    p = problem(kind, [2 * 24 + 5, 1, 0, 24, 23], block_tokens=24, heads=heads, state_dim=12, head_dim=5)
    positions = [[24, 53], [1, 0], [0, 0], [24, 3], [0, 22]]
    outs, final, exports = p.scan(implementation, positions, num_blocks=7)
    want_outs, states = p.expected()
    assert_close(outs, want_outs)
    assert_close(final, [x[-1] for x in states])
    for row, at in enumerate(positions):
        assert_close(exports[row], [s if n else 0 * s for n, s in zip(at, states[row][at], strict=True)])
    np.testing.assert_array_equal(final[2], p.initial[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_of_a_block_works(problem, kind, implementation):
    for n in range(1, 17):
        p = problem(kind, [n, 17 - n, 32 + n], seed=n)
        outs, final, _ = p.scan(implementation, NO_EXPORTS, NUM_BLOCKS)
        want_outs, states = p.expected()
        assert_close(outs, want_outs)
        assert_close(final, [x[-1] for x in states])


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_64_tokens_is_exact_whatever_the_decays(problem, kind):
    """Slow decays beside fast ones: a difference of two sums of 1e3 would lose 1e-4 of the slow ones."""
    p = problem(kind, [64, 130], block_tokens=64, heads=(1, 2), state_dim=16, head_dim=16)
    for decay in p.inputs[3]:
        decay[::3] *= 50.0
        decay[1::7] = 0.0
        decay[2::11] = -np.inf
    outs, final, _ = p.scan()
    want_outs, states = p.expected()
    assert_close(outs, want_outs)
    assert_close(final, [x[-1] for x in states])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_one_key_written_again_and_again_stays_exact(problem, kind):
    """The system of a block is then all ones below the diagonal, whose powers are huge."""
    p = problem(kind, [64, 130], block_tokens=64, heads=(1, 2), state_dim=16, head_dim=16, decay=(1e-6, 1e-5))
    for k, beta in zip(p.inputs[1], p.inputs[4], strict=True):
        k[:] = k[0]
        beta[:] = 1.0
    outs, final, _ = p.scan()
    want_outs, states = p.expected()
    assert_close(outs, want_outs)
    assert_close(final, [x[-1] for x in states])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_bits_of_the_same_call_that_ends_there(problem, kind, implementation):
    p = problem(kind, LENGTHS, seed=1)
    for row, length in enumerate(LENGTHS):
        for position in range(1, length + 1, 1 if implementation == "xla" else 5):
            asked = [[0, 0], [0, 0], [0, 0]]
            asked[row] = [position, length + 1 - position]
            _, _, exports = p.scan(implementation, asked, num_blocks=NUM_BLOCKS)
            stop = [*LENGTHS]
            stop[row] = position
            _, final, none = p.part([0] * 3, stop, p.initial).scan(implementation, NO_EXPORTS, NUM_BLOCKS)
            np.testing.assert_array_equal(exports[row, 0], final[row])
            stop[row] = length + 1 - position
            _, final, none = p.part([0] * 3, stop, p.initial).scan(implementation, NO_EXPORTS, NUM_BLOCKS)
            np.testing.assert_array_equal(exports[row, 1], final[row])
            assert not none.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_may_be_computed_in_two_calls(problem, kind, implementation):
    p = problem(kind, LENGTHS, seed=2)
    outs, final, _ = p.scan(implementation, NO_EXPORTS, NUM_BLOCKS)
    for cut in ([1, 15, 3], [16, 9, 4], [20, 1, 19], [38, 0, 20]):
        outs_1, middle, _ = p.part([0] * 3, cut, p.initial).scan(implementation, NO_EXPORTS, NUM_BLOCKS)
        outs_2, final_2, _ = p.part(cut, LENGTHS, middle).scan(implementation, NO_EXPORTS, NUM_BLOCKS)
        joined = [np.concatenate(x) for x in zip(outs_1, outs_2, strict=True)]
        if implementation == "reference":
            for got, want in zip([*joined, final_2], [*outs, final], strict=True):
                np.testing.assert_array_equal(got, want)
        else:
            assert_close(joined, outs)
            assert_close(final_2, final)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_has_the_same_bits_whatever_runs_beside(problem, kind):
    p = problem(kind, LENGTHS, seed=3)
    outs, _, _ = p.scan("reference", NO_EXPORTS, NUM_BLOCKS)
    alone = p.part([0] * 3, [39, 0, 0], p.initial).scan("reference", NO_EXPORTS, NUM_BLOCKS)
    np.testing.assert_array_equal(alone[0][0], outs[0])
    alone = p.part([0] * 3, [0, 0, 20], p.initial).scan("reference", [[0]] * 3, 2)
    np.testing.assert_array_equal(alone[0][2], outs[2])


@pytest.mark.parametrize("kind", KINDS)
def test_reference_has_the_bits_of_decoding_token_by_token(problem, kind):
    p = problem(kind, LENGTHS, seed=3)
    outs, final, _ = p.scan("reference", NO_EXPORTS, NUM_BLOCKS)
    decode = jax.jit(ssm_nodes, static_argnames="kind")
    for rows in ([1], [0, 2, 1]):
        pool = jnp.asarray(np.concatenate([np.full_like(p.initial[:1], np.nan), p.initial[rows]]))
        slot, none = jnp.arange(1, len(rows) + 1, dtype=jnp.int32), jnp.zeros(len(rows), jnp.int32)
        plan = NodesPlan(slot, slot, none, none, none + 1, jnp.zeros((len(rows), 0), jnp.int32), none)
        for t in range(16):
            now = [
                None if x is None else jnp.asarray(np.stack([x[r][t : t + 1] for r in rows]))
                for x in p.inputs
            ]
            pool, out, _ = decode(kind, pool, Inputs(*now), None, plan)
            np.testing.assert_array_equal(out[:, 0], np.stack([outs[r][t] for r in rows]))
        np.testing.assert_array_equal(pool[1 + rows.index(1)], final[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_blocks_between_rows_change_nothing(problem, kind, implementation):
    p = problem(kind, [20, 5, 32], seed=4)
    positions = [[20, 0], [2, 5], [0, 1]]
    plain = p.scan(implementation, positions, NUM_BLOCKS)
    blocks = cut_rows(p.lengths, 16, exports=positions, num_blocks=NUM_BLOCKS)
    spread = jax.tree.map(lambda x: x[jnp.array([5, 0, 1, 6, 2, 3, 4])], blocks)
    for got, want in zip(p.scan(implementation, blocks=spread), plain, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_inputs_of_any_float_dtype_give_float32(problem):
    p = problem("gdn", [20])
    blocks = cut_rows(p.lengths, 16)
    inputs = [x.astype(jnp.bfloat16) for x in (*p.packed(blocks), jnp.asarray(p.initial))]
    for implementation in IMPLEMENTATIONS:
        results = jax.eval_shape(
            functools.partial(ssm_scan, "gdn", implementation=implementation), *inputs, blocks
        )
        assert {x.dtype for x in results} == {jnp.dtype(jnp.float32)}


def test_wrong_arguments_are_refused_by_name(problem):
    blocks = cut_rows([3], 16)
    args = {kind: [*problem(kind, [3]).packed(blocks), jnp.zeros((1, 4, 8, 8))] for kind in KINDS}
    three = problem("gdn", [3], heads=(2, 3)).packed(blocks)
    no_beta, some_beta = [*args["gdn"]], [*args["mamba2"]]
    no_beta[4], some_beta[4] = None, args["gdn"][4]
    for message, kind, call in (
        ("unknown kind 'rwkv'; there are mamba2, gdn, kda", "rwkv", args["gdn"]),
        ("a multiple of key heads, got 3 and 2", "gdn", [*three, jnp.zeros((1, 3, 8, 8))]),
        (r"'gdn' takes log_decay of shape \(1, 16, 4\)", "gdn", args["kda"]),
        (r"'kda' takes log_decay of shape \(1, 16, 4, 8\)", "kda", args["gdn"]),
        ("'gdn' needs beta", "gdn", no_beta),
        ("'mamba2' takes no beta", "mamba2", some_beta),
    ):
        with pytest.raises(ValueError, match=message):
            ssm_scan(kind, *call, blocks)
    with pytest.raises(ValueError, match="unknown implementation 'triton'; there are xla, reference"):
        ssm_scan("gdn", *args["gdn"], blocks, implementation="triton")
