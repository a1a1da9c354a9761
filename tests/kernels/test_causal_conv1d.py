"""`causal_conv1d` convolves each whole row, however the row is cut, and carries raw inputs exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.blocks import cut_rows
from kernels_pallas.causal_conv1d import causal_conv1d, causal_conv1d_step

CHANNELS, LENGTHS, NUM_BLOCKS = 21, [11, 1, 0, 4, 2], 10

conv = jax.jit(causal_conv1d)
step = jax.jit(causal_conv1d_step)


class Rows:
    """Random rows, their windows and a filter; `width` taps."""

    def __init__(self, width, seed=0, lengths=LENGTHS, dtype=jnp.float32, bias=True):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
        self.x = [np.asarray(draw(n, CHANNELS)) for n in lengths]
        self.weight, self.bias = draw(CHANNELS, width), draw(CHANNELS) if bias else None
        self.window = np.asarray(draw(len(lengths), width - 1, CHANNELS))

    def run(self, start, stop, window, block_tokens, exports=None):
        """`(outputs, one array a row; final; exports)` of tokens `start[r]` to `stop[r]`."""
        lengths = [b - a for a, b in zip(start, stop, strict=True)]
        blocks = cut_rows(lengths, block_tokens, exports=exports, num_blocks=NUM_BLOCKS)
        packed = np.full((NUM_BLOCKS, block_tokens, CHANNELS), np.nan, self.window.dtype)
        flat = [(b, t) for b, n in enumerate(blocks.length.tolist()) for t in range(n)]
        rows = [x[a:b] for x, a, b in zip(self.x, start, stop, strict=True)]
        for at, token in zip(flat, np.concatenate(rows), strict=True):
            packed[at] = token
        out, *windows = conv(jnp.asarray(packed), self.weight, self.bias, jnp.asarray(window), blocks)
        out = np.asarray(out)
        assert not out[~np.asarray(blocks.valid(block_tokens))].any(), "padding tokens must put out 0"
        outs = np.split(np.stack([out[at] for at in flat]), np.cumsum(lengths)[:-1])
        return outs, *(np.asarray(x) for x in windows)

    def whole(self, block_tokens, exports=None):
        return self.run([0] * len(self.x), [len(x) for x in self.x], self.window, block_tokens, exports)

    def inputs(self):
        """Each row's window and tokens."""
        return [np.concatenate(x) for x in zip(self.window, self.x, strict=True)]


@pytest.mark.parametrize("block_tokens", [2, 4, 8])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_are_convolved_from_their_windows(width, block_tokens, bias):
    """Rows, and blocks, shorter than the window too. A sum of five products rounds by at most 5 * 6e-8."""
    rows = Rows(width, bias=bias)
    outs, final, _ = rows.whole(block_tokens)
    for r, inputs in enumerate(rows.inputs()):
        n = len(rows.x[r])
        taps = [inputs[t : t + n].astype(np.float64) * np.asarray(rows.weight)[:, t] for t in range(width)]
        want = np.sum(taps, axis=0) + (np.asarray(rows.bias) if bias else 0)
        np.testing.assert_allclose(
            outs[r], want, rtol=0, atol=3e-7 * sum(np.abs(t).max(initial=1) for t in taps)
        )
        np.testing.assert_array_equal(final[r], inputs[n:])


@pytest.mark.parametrize("block_tokens", [2, 8])
def test_exports_are_the_raw_inputs_before_a_position(block_tokens):
    rows = Rows(4)
    for position in range(1, 12):
        at = [[min(position, n), min(n, 1)] for n in LENGTHS]
        _, _, exports = rows.whole(block_tokens, at)
        for r, inputs in enumerate(rows.inputs()):
            for e, p in enumerate(at[r]):
                np.testing.assert_array_equal(
                    exports[r, e], inputs[p : p + 3] if p else np.zeros((3, CHANNELS))
                )


@pytest.mark.parametrize("bias", [True, False])
def test_a_row_in_two_calls_or_in_steps_has_the_same_bits(bias):
    rows = Rows(4, bias=bias)
    outs, final, _ = rows.whole(4)
    for cut in ([1, 1, 0, 2, 0], [8, 0, 0, 4, 1]):
        outs_1, middle, _ = rows.run([0] * 5, cut, rows.window, 4)
        outs_2, final_2, _ = rows.run(cut, LENGTHS, middle, 4)
        for got, want in zip([*map(np.concatenate, zip(outs_1, outs_2, strict=True))], outs, strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(final_2, final)
    for several in ([0], [0, 3, 0]):
        window = jnp.asarray(rows.window[several])
        for t in range(4):
            now = jnp.asarray(np.stack([rows.x[r][t] for r in several]))
            out, window = step(now, rows.weight, rows.bias, window)
            np.testing.assert_array_equal(out, np.stack([outs[r][t] for r in several]))
        np.testing.assert_array_equal(window[0], rows.x[0][1:4])


def test_bfloat16_is_summed_in_float32_and_rounded_once():
    rows = Rows(4, dtype=jnp.bfloat16)
    outs, final, _ = rows.whole(8)
    assert outs[0].dtype == final.dtype == jnp.bfloat16
    inputs, weight = (np.asarray(x, np.float64) for x in (rows.inputs()[0], rows.weight))
    want = np.asarray(rows.bias, np.float64) + sum(inputs[t : t + 11] * weight[:, t] for t in range(4))
    # Half a unit in the last place of 8 bits, of each value.
    np.testing.assert_allclose(np.asarray(outs[0], np.float64), want, rtol=2**-8, atol=1e-6)


def test_gradients_do_not_see_padding():
    rows = Rows(4, lengths=[3])
    x = jnp.full((1, 4, CHANNELS), jnp.nan).at[0, :3].set(rows.x[0])
    window, blocks = jnp.asarray(rows.window), cut_rows([3], 4)

    def loss(x, weight, bias, window):
        out, final, _ = causal_conv1d(x, weight, bias, window, blocks)
        return jnp.sum(out) + jnp.sum(final)

    of_x, of_weight, _, of_window = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(
        x, rows.weight, rows.bias, window
    )
    assert np.isfinite(of_weight).all()
    assert np.isfinite(of_window).all()
    assert not of_x[0, 3].any()
    inputs = rows.inputs()[0]
    want = [inputs[t : t + 3].sum(axis=0) for t in range(4)]
    # Sums of three values round by at most three units of 6e-8 of their largest.
    np.testing.assert_allclose(of_weight.T, want, rtol=0, atol=1e-6)


def test_wrong_windows_are_refused():
    rows, blocks = Rows(4), cut_rows([3], 4)
    x, window = jnp.zeros((1, 4, CHANNELS)), jnp.zeros((1, 2, CHANNELS))
    with pytest.raises(ValueError, match="width - 1 = 3 inputs, got 2"):
        causal_conv1d(x, rows.weight, None, window, blocks)
    with pytest.raises(ValueError, match="width - 1 = 3 inputs, got 2"):
        causal_conv1d_step(x[0], rows.weight, None, jnp.zeros((4, 2, CHANNELS)))
    with pytest.raises(ValueError, match="window is bfloat16, but x is float32"):
        causal_conv1d(x, rows.weight, None, jnp.zeros((1, 3, CHANNELS), jnp.bfloat16), blocks)
