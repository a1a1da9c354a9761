"""A model's part of a step: a plan's tokens through all layers, over the pools.

Two forms. `advance` computes all tokens of a step together, in chunk form: the fast one. `advance_in_blocks`
takes the blocks one at a time through one loop body of fixed shape, token by token in the recurrences: a
token then passes through the same arithmetic whatever else is in the step, so its bits depend on its own
prefix alone.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mambacache_jax.device import PooledContext, Pools
from mambacache_jax.models.model import Model

Fields = Mapping[str, Int32[Array, "..."]]


def advance(
    model: Model, params: Any, pools: Pools, plan: Fields, page_size: int
) -> tuple[Pools, Float[Array, "token model"]]:
    """Runs a step's tokens: decode rows first, then the blocks' tokens.

    Returns:
      The pools after the step, and the hidden state of every token, before the head.
    """
    ctx = PooledContext(pools, plan, model.specs, page_size, scan_implementation=None)
    hidden = model.hidden(params, ctx.tokens, ctx)
    return ctx.pools, hidden


def advance_in_blocks(
    model: Model, params: Any, pools: Pools, plan: Fields, page_size: int
) -> tuple[Pools, Float[Array, "token vocab"]]:
    """Runs a step of extend blocks only, block by block.

    Returns:
      The pools after the step, and the float32 logits of every token of every block (padding: garbage).
    """
    blocks, block_tokens = plan["token"].shape
    # The plan's table updates go in once; the loop's contexts have none.
    first = PooledContext(pools, _block(plan, 0, empty=True), model.specs, page_size, "reference")
    logits = jnp.zeros((blocks, block_tokens, model.vocab_size), jnp.float32)

    def body(index: Int32[Array, ""], carry: tuple[Pools, Array]) -> tuple[Pools, Array]:
        pools, logits = carry
        ctx = PooledContext(pools, _block(plan, index), model.specs, page_size, "reference")
        hidden = model.hidden(params, ctx.tokens, ctx)
        return ctx.pools, logits.at[index].set(model.logits(params, hidden))

    used = jnp.sum(plan["block_length"] > 0, dtype=jnp.int32)
    pools, logits = jax.lax.fori_loop(0, used, body, (first.pools, logits))
    return pools, logits.reshape(blocks * block_tokens, model.vocab_size)


def _block(plan: Fields, index: Any, empty: bool = False) -> dict[str, Array]:
    """Block `index` as a plan of its own, with one row; `empty` keeps the table updates and nothing else."""
    one = {
        name: plan[name][:0] if name.startswith("decode_") else plan[name][index][None]
        for name in plan
        if name.startswith(("decode_", "block_")) or name == "token"
    }
    row = jnp.minimum(one["block_row"][0], plan["row"].shape[0] - 1)
    for name in ("row", "read", "write", "end", "export_slot", "export_position"):
        one[name] = plan[name][row][None]
    # A row's later blocks go on from what its earlier ones wrote.
    one["read"] = jnp.where(one["block_first"] != 0, one["read"], one["write"])
    one["end"] = one["block_start"] + one["block_length"]
    here = one["block_export"] > 0
    one["export_slot"] = jnp.where(here, one["export_slot"], 0)
    one["block_row"] = jnp.zeros((1,), jnp.int32)
    one["block_first"] = jnp.ones((1,), jnp.int32)
    for name in ("update_row", "update_block", "update_pages"):
        one[name] = plan[name] if empty else plan[name][:0]
    if empty:
        zero = {name: jnp.zeros_like(field) for name, field in one.items() if not name.startswith("update_")}
        one = {**one, **zero, "block_row": jnp.ones((1,), jnp.int32)}
    return one
