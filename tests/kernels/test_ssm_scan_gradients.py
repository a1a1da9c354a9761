"""The chunk form can be trained through: its gradients are those of the step, finite at any decay, and batch.

The gradients' tolerance is ten times the outputs': each sums over all later tokens too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.blocks import cut_rows
from kernels_pallas.recurrence import advance, by_head, key_column, read_out
from kernels_pallas.ssm_scan import ssm_scan

KINDS = ("mamba2", "gdn", "kda")


def steps(kind, inputs, initial):
    """Outputs and final state of one row, `[token, ...]`, by a scan over the recurrence."""

    def step(state, x):
        q, k, v, log_decay, beta = x
        heads = v.shape[0]
        state = advance(kind, state, *by_head(kind, heads, k, v, log_decay, beta))
        return state, read_out(state, key_column(heads, q))[..., 0, :]

    final, outs = jax.lax.scan(step, initial, inputs)
    return outs, final


def scalar(out, final):
    """A loss that weighs every output and state element differently."""
    weigh = [jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in (out, final)]
    return jnp.sum(out * weigh[0]) + jnp.sum(final * weigh[1])


def blocks_of_four(x):
    x = jnp.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1), constant_values=jnp.nan)
    return x.reshape(2, 4, *x.shape[1:])


@pytest.fixture(scope="module", params=KINDS)
def case(request, problem):
    """One row of 6 tokens in two blocks of 4: the scan, its inputs and initial state, both gradients."""
    kind = request.param
    p = problem(kind, [6], block_tokens=4, heads=(1, 2), state_dim=4, head_dim=4)
    inputs = [None if x is None else jnp.asarray(x[0]) for x in p.inputs]

    def by_scan(inputs, initial):
        # Padding tokens are NaN: they must not reach a gradient either.
        blocked = [None if x is None else blocks_of_four(x) for x in inputs]
        out, final, _ = ssm_scan(kind, *blocked, initial[None], cut_rows([6], 4))
        return out.reshape(8, *out.shape[2:])[:6], final[0]

    gradients = [
        jax.jit(jax.grad(lambda x, s, f=f: scalar(*f(x, s)), argnums=(0, 1)))
        for f in (by_scan, lambda x, s: steps(kind, x, s))
    ]
    return by_scan, inputs, jnp.asarray(p.initial[0]), gradients


def test_gradients_are_those_of_the_step(case):
    _, inputs, initial, (of_scan, of_steps) = case
    got, want = of_scan(inputs, initial), of_steps(inputs, initial)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("decay", [0.0, -1e3, -jnp.inf], ids=str)
def test_gradients_stay_finite_at_any_decay(case, decay):
    _, inputs, initial, (of_scan, _) = case
    for tokens in (slice(None), slice(1, None, 3)):
        changed = [*inputs]
        changed[3] = inputs[3].at[tokens].set(decay)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(of_scan(changed, initial)))


def test_rows_can_be_a_batch_axis(case):
    by_scan, inputs, initial, _ = case
    rows = [jax.tree.map(lambda x, n=n: x * (1.0 - 0.1 * n), (inputs, initial)) for n in range(2)]
    batched = jax.jit(jax.vmap(by_scan))(*jax.tree.map(lambda *x: jnp.stack(x), *rows))
    for n, row in enumerate(rows):
        for got, want in zip(batched, jax.jit(by_scan)(*row), strict=True):
            # Batched products may round differently: a few units in the last place.
            np.testing.assert_allclose(got[n], want, rtol=0, atol=2e-6 * float(jnp.abs(want).max()))
