"""Paged attention equals plain attention over each request's own tokens, and looks at nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mambacache_jax.device import attention
from mambacache_jax.layout import TABLE_BLOCK, context_pages, tile_pages


def plain(q, k, v, positions, scale):
    """float64, one query at a time: q [query, q_head, dim] against k [token, kv_head, dim]."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for i, position in enumerate(positions):
        for head in range(q.shape[1]):
            scores = k[: position + 1, head // group] @ q[i, head] * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[: position + 1, head // group] / weights.sum()
    return out


def scattered(rng, lengths, page_size, kv_heads, head_dim, v_dim, max_context):
    """Pools that hold NaN wherever no token lies, each request's tokens on pages in random order."""
    pages = context_pages(max_context, page_size)
    counts = [-(-n // page_size) for n in lengths]
    order = rng.permutation(np.arange(1, sum(counts) + 3))
    slots = (sum(counts) + 3) * page_size
    k_pool = np.full((slots, kv_heads, head_dim), np.nan, np.float32)
    v_pool = np.full((slots, kv_heads, v_dim), np.nan, np.float32)
    table, ks, vs, at = np.zeros((len(lengths), pages), np.int32), [], [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = order[at : at + count]
        at += count
        where = table[row, np.arange(length) // page_size] * page_size + np.arange(length) % page_size
        ks.append(rng.normal(size=(length, kv_heads, head_dim)).astype(np.float32))
        vs.append(rng.normal(size=(length, kv_heads, v_dim)).astype(np.float32))
        k_pool[where], v_pool[where] = ks[-1], vs[-1]
    return k_pool, v_pool, table, ks, vs


@pytest.mark.parametrize("page_size", [1, 4, 48])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
def test_blocks_of_several_requests_match_plain_attention(page_size, heads):
    rng = np.random.default_rng(0)
    q_heads, kv_heads = heads
    lengths, starts = [300, 37, 6], [290, 30, 0]
    k_pool, v_pool, table, ks, vs = scattered(rng, lengths, page_size, kv_heads, 8, 5, 600)
    q = rng.normal(size=(4, 10, q_heads, 8)).astype(np.float32)
    positions = np.zeros((4, 10), np.int32)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        positions[row, : length - start] = np.arange(start, length)
    rows = np.concatenate([table, np.zeros((1, table.shape[1]), np.int32)])
    out = jax.jit(attention.paged_attention, static_argnames=("scale", "page_size"))(
        q, k_pool, v_pool, rows, positions, np.array([*lengths, 0], np.int32), scale=0.3, page_size=page_size
    )
    assert not np.isnan(out).any()
    assert (np.asarray(out[3]) == 0).all()
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        count = length - start
        expected = plain(q[row, :count], ks[row], vs[row], positions[row, :count], 0.3)
        # float32 sums of up to 300 weighted values.
        np.testing.assert_allclose(out[row, :count], expected, rtol=2e-5, atol=2e-6)


def test_a_query_sees_its_own_position_and_none_after():
    rng = np.random.default_rng(1)
    k_pool, v_pool, table, _, _ = scattered(rng, [8], 1, 1, 4, 4, 256)
    q = rng.normal(size=(1, 8, 1, 4)).astype(np.float32)
    positions = np.arange(8, dtype=np.int32)[None]

    def run(v):
        return np.asarray(
            attention.paged_attention(
                *map(jnp.asarray, (q, k_pool, v, table, positions)),
                jnp.array([8]),
                scale=1.0,
                page_size=1,
            )
        )

    before = run(v_pool)
    changed = v_pool.copy()
    changed[table[0, 5]] += 1.0
    after = run(changed)
    assert (before[0, :5] == after[0, :5]).all()
    assert (before[0, 5:] != after[0, 5:]).all()


def test_values_in_keys_are_their_first_channels():
    rng = np.random.default_rng(2)
    k_pool, _, table, _, _ = scattered(rng, [300], 1, 1, 8, 5, 600)
    q = jnp.asarray(rng.normal(size=(1, 1, 4, 8)), jnp.float32)
    arrays = [jnp.asarray(table), jnp.array([[299]], jnp.int32), jnp.array([300], jnp.int32)]

    def run(v_pool, values_in_keys):
        return attention.paged_attention(
            q,
            jnp.asarray(k_pool),
            jnp.asarray(v_pool),
            *arrays,
            scale=0.3,
            page_size=1,
            values_in_keys=values_in_keys,
        )

    apart = run(k_pool[..., :5], None)
    assert apart.shape == (1, 1, 4, 5)
    assert np.array_equal(run(k_pool[..., :0], 5), apart)


@pytest.mark.parametrize("page_size", [1, 4, 48, 64, 512])
@pytest.mark.parametrize("max_context", [1, 256, 257, 5000])
def test_context_pages_cover_the_context_in_whole_tiles_and_update_runs(max_context, page_size):
    pages = context_pages(max_context, page_size)
    assert pages * page_size >= max_context
    assert pages % tile_pages(page_size) == pages % TABLE_BLOCK == 0


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 query heads do not divide into 2"):
        attention.paged_attention(
            *map(jnp.zeros, ((1, 1, 3, 4), (2, 2, 4), (2, 2, 4))),
            jnp.zeros((1, 256), jnp.int32),
            jnp.zeros((1, 1), jnp.int32),
            jnp.zeros((1,), jnp.int32),
            scale=1.0,
            page_size=1,
        )
