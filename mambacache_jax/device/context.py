"""What a model's layers see of the pools during one step.

A model calls `conv`, `recur` and `attend`, layer by layer; this context finds the state of each row in
its read slot, advances it, and leaves it in the write slot and the export slots. Tokens are flat: first
one for each decode row, then the extend blocks, block by block.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.blocks import Blocks
from kernels_pallas.causal_conv1d import causal_conv1d, causal_conv1d_step
from kernels_pallas.ssm_nodes import Inputs, NodesPlan, ssm_nodes
from kernels_pallas.ssm_scan import ssm_scan
from mambacache_jax.config import AttentionSpec, LayerSpec, RecurrentSpec
from mambacache_jax.device import kv_pool, request_table, ssm_pool
from mambacache_jax.device.attention import paged_attention
from mambacache_jax.device.pools import Pools
from mambacache_jax.layout import FROM_DEVICE


class PooledContext:
    """One step's view of the pools, for one trace: `pools` is replaced as layers run.

    Attributes:
      pools: the pools so far; take them out when the last layer has run.
      tokens: the step's input tokens, `[decode_rows + blocks * block_tokens]`.
      positions: the position of each of them in its own request.
    """

    def __init__(
        self,
        pools: Pools,
        plan: Mapping[str, Int32[Array, "..."]],
        specs: Sequence[LayerSpec],
        page_size: int,
        scan_implementation: str | None,
    ) -> None:
        """Writes the plan's table updates and stamps, and lays out tokens and slots.

        Args:
          pools: the pools as the last step left them.
          plan: the fields of `layout.PlanShape`.
          specs: the model's layers.
          page_size: KV slots a page.
          scan_implementation: for `ssm_scan`; None takes the platform's.
        """
        self._plan, self._specs, self._page_size, self._scan = plan, specs, page_size, scan_implementation
        self._index = _pool_index(specs)
        decode_rows, (blocks, block_tokens) = plan["decode_row"].shape[0], plan["token"].shape
        table = request_table.set_blocks(
            pools.table, plan["update_row"], plan["update_block"], plan["update_pages"]
        )
        position = plan["decode_position"]
        # A decode row that stays on its page writes the null row.
        table = request_table.set_page(
            table,
            jnp.where(plan["decode_page"] != 0, plan["decode_row"], 0),
            position // page_size,
            plan["decode_page"],
        )
        stamps = pools.ssm.position.at[self._state_slots()].set(
            jnp.concatenate([position + 1, plan["end"], plan["export_position"].reshape(-1)]),
            mode="promise_in_bounds",
        )
        self.pools = pools._replace(table=table, ssm=pools.ssm._replace(position=stamps))

        self._blocks = Blocks(
            row=plan["block_row"],
            first=plan["block_first"] != 0,
            length=plan["block_length"],
            export=plan["block_export"],
        )
        # Padding blocks name the row past the last one; here they get the null row.
        padded_rows = jnp.concatenate([plan["row"], jnp.zeros((1,), jnp.int32)])
        self._block_table_row = padded_rows[plan["block_row"]]
        offset = jnp.arange(block_tokens, dtype=jnp.int32)
        block_position = plan["block_start"][:, None] + offset[None, :]
        in_block = offset[None, :] < plan["block_length"][:, None]
        self._block_position = jnp.where(in_block, block_position, 0)
        self.positions: Int32[Array, " token"] = jnp.concatenate([position, self._block_position.reshape(-1)])

        last = self.pools.table.last_token
        decode_token = jnp.where(
            plan["decode_token"] == FROM_DEVICE, last[plan["decode_row"]], plan["decode_token"]
        )
        block_token = jnp.where(
            plan["token"] == FROM_DEVICE, last[self._block_table_row][:, None], plan["token"]
        )
        self.tokens: Int32[Array, " token"] = jnp.concatenate([decode_token, block_token.reshape(-1)])

        decode_slots = request_table.slots_of(self.pools.table, plan["decode_row"], position, page_size)
        block_rows = jnp.broadcast_to(self._block_table_row[:, None], (blocks, block_tokens))
        block_slots = request_table.slots_of(self.pools.table, block_rows, self._block_position, page_size)
        live = jnp.concatenate([plan["decode_row"] != 0, in_block.reshape(-1)])
        self._kv_slots = jnp.where(live, jnp.concatenate([decode_slots, block_slots.reshape(-1)]), 0)
        self._decode_rows, self._block_shape = decode_rows, (blocks, block_tokens)
        none = jnp.zeros((decode_rows,), jnp.int32)
        self._decode_plan = NodesPlan(
            read_slot=plan["decode_read"],
            write_slot=plan["decode_write"],
            track_slot=none,
            track_len=none,
            pending_len=(plan["decode_row"] != 0).astype(jnp.int32),
            parent=jnp.zeros((decode_rows, 0), jnp.int32),
            node_len=none,
        )
        self._has_blocks = blocks > 0

    def _state_slots(self) -> Int32[Array, " state"]:
        return jnp.concatenate([self._plan["decode_write"], self._extend_slots()])

    def _extend_slots(self) -> Int32[Array, " state"]:
        return jnp.concatenate([self._plan["write"], self._plan["export_slot"].reshape(-1)])

    def _split(self, x: Array) -> tuple[Array, Array]:
        """`[token, ...]` as decode rows and extend blocks."""
        return x[: self._decode_rows], x[self._decode_rows :].reshape(self._block_shape + x.shape[1:])

    def _join(self, decode: Array, extend: Array) -> Array:
        return jnp.concatenate([decode, extend.reshape((-1, *extend.shape[2:]))])

    def _read(self, leaf: Array) -> tuple[Array, Array]:
        rows = ssm_pool.read_slots(leaf, jnp.concatenate([self._plan["decode_read"], self._plan["read"]]))
        return rows[: self._decode_rows], rows[self._decode_rows :]

    def _write(self, leaf: Array, decode: Array, final: Array, exports: Array) -> Array:
        rows = jnp.concatenate([decode, final, exports.reshape((-1, *exports.shape[2:]))])
        return ssm_pool.write_slots(leaf, self._state_slots(), rows)

    def conv(
        self,
        layer: int,
        x: Float[Array, "token channel"],
        weight: Float[Array, "channel width"],
        bias: Float[Array, " channel"] | None,
    ) -> Float[Array, "token channel"]:
        """The causal conv of recurrent layer `layer`, without activation; moves the layer's windows on."""
        index = self._index[layer]
        leaf = self.pools.ssm.conv[index]
        decode_x, extend_x = self._split(x)
        decode_window, extend_window = self._read(leaf)
        decode_out, decode_window = causal_conv1d_step(decode_x, weight, bias, decode_window)
        if not self._has_blocks:
            extend_out, final, exports = extend_x, extend_window, extend_window[:, None]
        else:
            extend_out, final, exports = causal_conv1d(extend_x, weight, bias, extend_window, self._blocks)
        leaf = self._write(leaf, decode_window, final, exports)
        ssm = self.pools.ssm
        self.pools = self.pools._replace(ssm=ssm._replace(conv=_replaced(ssm.conv, index, leaf)))
        return self._join(decode_out, extend_out)

    def recur(
        self,
        layer: int,
        q: Float[Array, "token key_head state_dim"],
        k: Float[Array, "token key_head state_dim"],
        v: Float[Array, "token head head_dim"],
        log_decay: Float[Array, "token head *state_dim"],
        beta: Float[Array, "token head"] | None,
    ) -> Float[Array, "token head head_dim"]:
        """The recurrence of layer `layer`; moves the layer's states on. Arguments as `ssm_scan`'s."""
        spec, index = self._specs[layer], self._index[layer]
        assert isinstance(spec, RecurrentSpec)
        leaf, inputs = self.pools.ssm.state[index], Inputs(q, k, v, log_decay, beta)
        decode = jax.tree.map(lambda x: self._split(x)[0][:, None], inputs)
        extend = jax.tree.map(lambda x: self._split(x)[1], inputs)
        leaf, decode_out, _ = ssm_nodes(spec.kind, leaf, decode, None, self._decode_plan)
        assert decode_out is not None
        extend_out = extend.v
        if self._has_blocks:
            extend_out, final, exports = ssm_scan(
                spec.kind,
                extend.q,
                extend.k,
                extend.v,
                extend.log_decay,
                extend.beta,
                ssm_pool.read_slots(leaf, self._plan["read"]).astype(jnp.float32),
                self._blocks,
                implementation=self._scan,
            )
            states = jnp.concatenate([final, exports.reshape((-1, *exports.shape[2:]))])
            leaf = ssm_pool.write_slots(leaf, self._extend_slots(), states)
        ssm = self.pools.ssm
        self.pools = self.pools._replace(ssm=ssm._replace(state=_replaced(ssm.state, index, leaf)))
        return self._join(decode_out[:, 0], extend_out)

    def attend(
        self,
        layer: int,
        q: Float[Array, "token q_head head_dim"],
        k: Float[Array, "token kv_head head_dim"],
        v: Float[Array, "token kv_head v_head_dim"] | None,
        scale: float,
    ) -> Float[Array, "token q_head _"]:
        """Writes the new K and V of attention layer `layer`, and attends to each row's context."""
        spec, index = self._specs[layer], self._index[layer]
        assert isinstance(spec, AttentionSpec)
        kv, plan, pages = self.pools.kv, self._plan, self.pools.table.pages
        k_leaf = kv_pool.write_rows(kv.k[index], self._kv_slots, k)
        v_leaf = kv.v[index] if v is None else kv_pool.write_rows(kv.v[index], self._kv_slots, v)
        kv = kv._replace(k=_replaced(kv.k, index, k_leaf), v=_replaced(kv.v, index, v_leaf))
        self.pools = self.pools._replace(kv=kv)
        decode_q, extend_q = self._split(q)
        decode_length = jnp.where(plan["decode_row"] != 0, plan["decode_position"] + 1, 0)
        extend_length = jnp.where(plan["block_length"] > 0, plan["block_start"] + plan["block_length"], 0)
        decode_out = paged_attention(
            decode_q[:, None],
            k_leaf,
            v_leaf,
            pages[plan["decode_row"]],
            plan["decode_position"][:, None],
            decode_length,
            scale=scale,
            page_size=self._page_size,
            values_in_keys=spec.v_head_dim if spec.values_in_keys else None,
        )
        extend_out = paged_attention(
            extend_q,
            k_leaf,
            v_leaf,
            pages[self._block_table_row],
            self._block_position,
            extend_length,
            scale=scale,
            page_size=self._page_size,
            values_in_keys=spec.v_head_dim if spec.values_in_keys else None,
        )
        return self._join(decode_out[:, 0], extend_out)


def _pool_index(specs: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Where each layer's leaf lies in its pool: attention and recurrent layers count apart."""
    index, attention, recurrent = [], 0, 0
    for spec in specs:
        if isinstance(spec, AttentionSpec):
            index.append(attention)
            attention += 1
        else:
            index.append(recurrent)
            recurrent += 1
    return tuple(index)


def _replaced(leaves: tuple[Array, ...], index: int, leaf: Array) -> tuple[Array, ...]:
    return (*leaves[:index], leaf, *leaves[index + 1 :])
