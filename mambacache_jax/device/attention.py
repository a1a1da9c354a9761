"""Attention of new tokens over a request's KV, which lies scattered over pool slots.

Plain JAX: the context is gathered tile by tile and folded with a running softmax, so no program depends
on a context length and no score matrix is larger than a tile. New K and V are in the pool before. Library
kernels for paged KV want pages of their own layout, and none of them takes token slots in any order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mambacache_jax.layout import tile_pages


def paged_attention(
    q: Float[Array, "block query q_head head_dim"],
    k_pool: Float[Array, "slot kv_head head_dim"],
    v_pool: Float[Array, "slot kv_head v_head_dim"],
    pages: Int32[Array, "block page"],
    positions: Int32[Array, "block query"],
    length: Int32[Array, " block"],
    *,
    scale: float,
    page_size: int,
    values_in_keys: int | None = None,
) -> Float[Array, "block query q_head _"]:
    """Causal attention of blocks of queries, each block over its own request's slots.

    Args:
      q: queries; query head `h` reads KV head `h // (q_head // kv_head)`.
      k_pool: keys by slot. Slots that no position of the context names may hold anything.
      v_pool: values by slot.
      pages: the request-table row of each block's request, a whole number of tiles.
      positions: position of each query; it sees keys at positions up to its own.
      length: tokens of the context of each block, its own queries included; 0 for padding.
      scale: factor on the products.
      page_size: slots a page.
      values_in_keys: so many first channels of a key are its value, and `v_pool` is not read; None: they are
        not.

    Returns:
      The weighted values, zero for padding blocks, in `q`'s dtype. Scores and sums are float32.
    """
    _, total, out = context_sums(
        q,
        k_pool,
        v_pool,
        pages,
        positions,
        length,
        scale=scale,
        page_size=page_size,
        values_in_keys=values_in_keys,
    )
    return weighted(total, out, q)


def context_sums(
    q: Float[Array, "block query q_head head_dim"],
    k_pool: Float[Array, "slot kv_head head_dim"],
    v_pool: Float[Array, "slot kv_head v_head_dim"],
    pages: Int32[Array, "block page"],
    positions: Int32[Array, "block query"],
    length: Int32[Array, " block"],
    *,
    scale: float,
    page_size: int,
    values_in_keys: int | None = None,
) -> tuple[
    Float[Array, "block kv_head row"],
    Float[Array, "block kv_head row"],
    Float[Array, "block kv_head row _"],
]:
    """The running softmax of `paged_attention`: arguments as there.

    Returns:
      Largest score (-inf without a key), sum of the weights and weighted values, relative to that score.
      A row is a query head of the KV head's group and a query: `row = head * query_count + query`.
    """
    blocks, queries, q_heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    v_dim = v_pool.shape[2] if values_in_keys is None else values_in_keys
    group = q_heads // kv_heads
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads do not divide into {kv_heads} KV heads.")
    per_tile = tile_pages(page_size)
    tile = per_tile * page_size
    # [block, kv_head, group * query, head_dim], so that each KV head is one matrix product.
    grouped = q.reshape(blocks, queries, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = (grouped.astype(jnp.float32) * scale).reshape(blocks, kv_heads, group * queries, head_dim)
    query_position = jnp.tile(positions, (1, group))  # [block, group * query]

    def fold(index, carry):
        best, total, out = carry
        tile_page = jax.lax.dynamic_slice_in_dim(pages, index * per_tile, per_tile, axis=1)
        slots = (tile_page[:, :, None] * page_size + jnp.arange(page_size)[None, None, :]).reshape(
            blocks, tile
        )
        key_position = index * tile + jnp.arange(tile, dtype=jnp.int32)
        live = (key_position[None, :] < length[:, None])[:, :, None, None]
        k = jnp.where(live, k_pool.at[slots].get(mode="promise_in_bounds"), jnp.zeros((), k_pool.dtype))
        if values_in_keys is None:
            v = jnp.where(live, v_pool.at[slots].get(mode="promise_in_bounds"), jnp.zeros((), v_pool.dtype))
        else:
            v = k[..., :values_in_keys]
        scores = jnp.einsum(
            "bhqd,bthd->bhqt", grouped, k.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        seen = (key_position[None, None, :] <= query_position[:, :, None]) & (
            key_position[None, None, :] < length[:, None, None]
        )
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        new_best = jnp.maximum(best, scores.max(axis=-1))
        # Until a query has seen a key its maximum is -inf; 0 stands in so that no difference is NaN.
        shift = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        weights = jnp.exp(scores - shift[..., None])
        keep = jnp.exp(best - shift)
        products = jnp.einsum(
            "bhqt,bthv->bhqv", weights, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        return new_best, total * keep + weights.sum(axis=-1), out * keep[..., None] + products

    shape = (blocks, kv_heads, group * queries)
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, v_dim), jnp.float32),
    )
    tiles = -(-jnp.max(length, initial=0) // tile)
    return jax.lax.fori_loop(0, tiles, fold, start)


def weighted(
    total: Float[Array, "block kv_head row"],
    out: Float[Array, "block kv_head row v_head_dim"],
    q: Float[Array, "block query q_head head_dim"],
) -> Float[Array, "block query q_head v_head_dim"]:
    """Sums as `context_sums` gives them, as outputs in the shape and dtype of the queries."""
    blocks, queries, q_heads, _ = q.shape
    kv_heads, v_dim = out.shape[1], out.shape[3]
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    out = out.reshape(blocks, kv_heads, q_heads // kv_heads, queries, v_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(blocks, queries, q_heads, v_dim).astype(q.dtype)
