"""Attention of draft-tree nodes over a request's KV in the pool and over their own ancestors.

The nodes' K and V are not in the pool: only accepted ones ever go there. Two forms. `path_attention` sees
each node's keys in the order of their positions, whoever holds them, through one loop body: a token has the
same bits as a node of any tree and as a decoded token. `tree_attention` shares the prefix's keys among the
nodes of a row and masks the nodes' own products: it reads the prefix once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from mambacache_jax.device.attention import context_sums, tile_pages, weighted

_PRECISION = jax.lax.Precision.HIGHEST


def tree_attention(
    q: Float[Array, "row node q_head head_dim"],
    k_pool: Float[Array, "slot kv_head head_dim"],
    v_pool: Float[Array, "slot kv_head v_head_dim"],
    k: Float[Array, "row node kv_head head_dim"],
    v: Float[Array, "row node kv_head v_head_dim"],
    pages: Int32[Array, "row page"],
    kv_len: Int32[Array, " row"],
    ancestors: Bool[Array, "row node node"],
    *,
    scale: float,
    page_size: int,
) -> Float[Array, "row node q_head v_head_dim"]:
    """The whole prefix, and each node's ancestors and itself.

    Args:
      q: queries; query head `h` reads KV head `h // (q_head // kv_head)`.
      k_pool: keys by slot; `v_pool` values.
      v_pool: values by slot.
      k: keys of the nodes, in the pool's dtype.
      v: values of the nodes.
      pages: the request-table row of each row.
      kv_len: tokens in the pool; 0 for padding.
      ancestors: whether the second node is the first or an ancestor of it; False throughout for padding.
      scale: factor on the products.
      page_size: slots a page.

    Returns:
      The weighted values, zero for padding, in `q`'s dtype.
    """
    rows, nodes, q_heads, _ = q.shape
    group = q_heads // k.shape[2]
    positions = jnp.broadcast_to(kv_len[:, None], (rows, nodes))
    best, total, out = context_sums(
        q, k_pool, v_pool, pages, positions, kv_len, scale=scale, page_size=page_size
    )
    # [row, kv_head, group * node, head_dim], the order of `context_sums`.
    grouped = q.reshape(rows, nodes, -1, group, q.shape[3]).transpose(0, 2, 3, 1, 4).astype(jnp.float32)
    grouped = (grouped * scale).reshape(rows, k.shape[2], group * nodes, -1)
    scores = jnp.einsum("rhqd,rnhd->rhqn", grouped, k.astype(jnp.float32), precision=_PRECISION)
    seen = jnp.tile(ancestors, (1, group, 1))[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    live = jnp.any(ancestors, axis=1)[:, :, None, None]
    values = jnp.where(live, v, jnp.zeros((), v.dtype)).astype(jnp.float32)
    new_best = jnp.maximum(best, scores.max(axis=-1))
    shift = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
    weights, keep = jnp.exp(scores - shift[..., None]), jnp.exp(best - shift)
    out = out * keep[..., None] + jnp.einsum("rhqn,rnhv->rhqv", weights, values, precision=_PRECISION)
    return weighted(total * keep + weights.sum(axis=-1), out, q)


def path_attention(
    q: Float[Array, "row node q_head head_dim"],
    k_pool: Float[Array, "slot kv_head head_dim"],
    v_pool: Float[Array, "slot kv_head v_head_dim"],
    k: Float[Array, "row node kv_head head_dim"],
    v: Float[Array, "row node kv_head v_head_dim"],
    pages: Int32[Array, "row page"],
    kv_len: Int32[Array, " row"],
    paths: Int32[Array, "row node depth"],
    *,
    scale: float,
    page_size: int,
) -> Float[Array, "row node q_head v_head_dim"]:
    """As `tree_attention`, key by key in the order of positions; reads the prefix once a node.

    Args:
      q: as there, and so are the others.
      paths: the ancestor of each node at each depth, itself at its own depth, -1 where there is none.
    """
    rows, nodes, q_heads, head_dim = q.shape
    kv_heads, depth = k.shape[2], paths.shape[2]
    per_tile = tile_pages(page_size)
    tile = per_tile * page_size
    grouped = (q.astype(jnp.float32) * scale).reshape(rows, nodes, kv_heads, q_heads // kv_heads, head_dim)
    row = jnp.arange(rows, dtype=jnp.int32)

    def fold(index, carry):
        best, total, out = carry
        tile_page = jax.lax.dynamic_slice_in_dim(pages, index * per_tile, per_tile, axis=1)
        slots = (tile_page[:, :, None] * page_size + jnp.arange(page_size)[None, None, :]).reshape(rows, tile)
        back = (index * tile + jnp.arange(tile, dtype=jnp.int32))[None, :] - kv_len[:, None]
        in_pool = (back < 0)[:, None, :]
        place = jnp.clip(back, 0, depth - 1)
        node = jnp.where((back < depth)[:, None, :], paths[row[:, None], :, place].transpose(0, 2, 1), -1)
        seen = jnp.where(in_pool, paths[:, :, :1] >= 0, node >= 0)

        def keys(pool, own):
            prefix = jnp.where(
                (back < 0)[:, :, None, None],
                pool.at[slots].get(mode="promise_in_bounds"),
                jnp.zeros((), pool.dtype),
            )
            mine = own[row[:, None, None], jnp.maximum(node, 0)]
            both = jnp.where(in_pool[..., None, None], prefix[:, None], mine.astype(pool.dtype))
            return jnp.where(seen[..., None, None], both, jnp.zeros((), pool.dtype)).astype(jnp.float32)

        scores = jnp.einsum("rnhgd,rnthd->rnhgt", grouped, keys(k_pool, k), precision=_PRECISION)
        scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
        new_best = jnp.maximum(best, scores.max(axis=-1))
        shift = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        weights, keep = jnp.exp(scores - shift[..., None]), jnp.exp(best - shift)
        products = jnp.einsum("rnhgt,rnthv->rnhgv", weights, keys(v_pool, v), precision=_PRECISION)
        return new_best, total * keep + weights.sum(axis=-1), out * keep[..., None] + products

    shape = grouped.shape[:4]
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, v.shape[3]), jnp.float32),
    )
    live = paths[:, :, 0] >= 0
    length = jnp.where(jnp.any(live, axis=1), kv_len + depth, 0)
    tiles = jnp.minimum(-(-jnp.max(length, initial=0) // tile), pages.shape[1] // per_tile)
    _, total, out = jax.lax.fori_loop(0, tiles, fold, start)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.reshape(rows, nodes, q_heads, v.shape[3]).astype(q.dtype)
