"""Draft trees as masks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def ancestor_mask(
    parent: Int32[Array, "row node"], node_len: Int32[Array, " row"], depth: int
) -> Float32[Array, "row node node"]:
    """`[r, i, j]`: 1 where node `j` is `i` or an ancestor of `i`, else 0; 0 for padding nodes.

    Args:
      parent: an earlier node, or -1; anything at padding nodes.
      node_len: nodes of each row that are not padding.
      depth: a bound on the nodes of a path.
    """
    node = jnp.arange(parent.shape[1], dtype=jnp.int32)
    live = node[None, :] < node_len[:, None]
    hop = (parent[:, :, None] == node[None, None, :]) & live[:, :, None] & live[:, None, :]
    hop = hop.astype(jnp.float32)
    mask = jnp.where((node[:, None] == node[None, :])[None] & live[:, None, :], 1.0, 0.0)
    reach = 1
    while reach < depth:
        # `mask` holds ancestors less than `reach` hops away, `hop` those that are exactly `reach` away.
        mask = mask + _product(hop, mask)
        hop = _product(hop, hop)
        reach *= 2
    return mask


def _product(x, y):
    return jnp.einsum("rij,rjk->rik", x, y, precision=jax.lax.Precision.HIGHEST)
