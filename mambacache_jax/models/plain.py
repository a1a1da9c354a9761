"""Whole sequences without pools: for training, and as the oracle that the pooled context is held to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.blocks import Blocks
from kernels_pallas.causal_conv1d import causal_conv1d
from kernels_pallas.ssm_scan import ssm_scan
from mambacache_jax.config import AttentionSpec, LayerSpec, RecurrentSpec


class PlainContext:
    """A batch of sequences of one length, each from position 0 and the zero state.

    Tokens are flat, `[row * length]`, row by row. Heads and channels of a layer do not mix, so rows run side
    by side as more heads of one row, and a scan is as long as one row has blocks.

    Attributes:
      positions: `0..length - 1`, once for each row.
      kv: K (rotated) and V of the attention layers that have run, by layer index.
    """

    def __init__(
        self,
        specs: tuple[LayerSpec, ...],
        num_rows: int,
        length: int,
        *,
        block_tokens: int = 64,
        implementation: str | None = None,
    ) -> None:
        """Lays out `num_rows` sequences of `length` tokens.

        Args:
          specs: the model's layers.
          num_rows: sequences.
          length: tokens of each.
          block_tokens: tokens of a block of the scan; does not change results beyond rounding.
          implementation: for `ssm_scan`; None takes the platform's.
        """
        self._specs, self._rows, self._length, self._implementation = specs, num_rows, length, implementation
        self._block = min(block_tokens, length)
        blocks = -(-length // self._block)
        index = jnp.arange(blocks, dtype=jnp.int32)
        self._blocks = Blocks(
            row=jnp.zeros((blocks,), jnp.int32),
            first=index == 0,
            length=jnp.minimum(self._block, length - index * self._block),
            export=jnp.zeros((blocks, 0), jnp.int32),
        )
        self.positions: Int32[Array, " token"] = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_rows)
        self.kv: dict[int, tuple[Array, Array]] = {}

    def _blocked(self, x: Array) -> Array:
        """`[token, head, ...]` as `[block, block token, row * head, ...]`, zeros after the last token."""
        x = jnp.moveaxis(x.reshape(self._rows, self._length, *x.shape[1:]), 0, 1)
        tail = self._blocks.row.shape[0] * self._block - self._length
        x = jnp.pad(x, [(0, tail)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, self._block, self._rows * x.shape[2], *x.shape[3:])

    def _flat(self, x: Array) -> Array:
        x = x.reshape(-1, *x.shape[2:])[: self._length]
        x = x.reshape(self._length, self._rows, -1, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0).reshape(self._rows * self._length, *x.shape[2:])

    def conv(
        self,
        layer: int,
        x: Float[Array, "token channel"],
        weight: Float[Array, "channel width"],
        bias: Float[Array, " channel"] | None,
    ) -> Float[Array, "token channel"]:
        """See `Context.conv`."""
        window = jnp.zeros((1, weight.shape[1] - 1, self._rows * x.shape[1]), x.dtype)
        weight = jnp.tile(weight, (self._rows, 1))
        bias = None if bias is None else jnp.tile(bias, self._rows)
        return self._flat(causal_conv1d(self._blocked(x), weight, bias, window, self._blocks)[0])

    def recur(
        self,
        layer: int,
        q: Float[Array, "token key_head state_dim"],
        k: Float[Array, "token key_head state_dim"],
        v: Float[Array, "token head head_dim"],
        log_decay: Float[Array, "token head *state_dim"],
        beta: Float[Array, "token head"] | None,
    ) -> Float32[Array, "token head head_dim"]:
        """See `Context.recur`."""
        spec = self._specs[layer]
        assert isinstance(spec, RecurrentSpec)
        shape = (1, self._rows * spec.num_heads, spec.state_dim, spec.head_dim)
        out, _, _ = ssm_scan(
            spec.kind,
            self._blocked(q),
            self._blocked(k),
            self._blocked(v),
            self._blocked(log_decay),
            None if beta is None else self._blocked(beta),
            jnp.zeros(shape, jnp.float32),
            self._blocks,
            implementation=self._implementation,
        )
        return self._flat(out)

    def attend(
        self,
        layer: int,
        q: Float[Array, "token q_head head_dim"],
        k: Float[Array, "token kv_head head_dim"],
        v: Float[Array, "token kv_head v_head_dim"] | None,
        scale: float,
    ) -> Float[Array, "token q_head _"]:
        """See `Context.attend`."""
        spec = self._specs[layer]
        assert isinstance(spec, AttentionSpec)
        self.kv[layer] = (k, k[..., : spec.v_head_dim] if v is None else v)
        return self.read(layer, q, scale)

    def read(
        self, layer: int, q: Float[Array, "token q_head head_dim"], scale: float
    ) -> Float[Array, "token q_head v_head_dim"]:
        """Attends to the K and V that layer `layer` has kept, causally, and keeps nothing."""
        k, v = self.kv[layer]
        rows, length = self._rows, self._length
        q, k, v = (x.reshape(rows, length, *x.shape[1:]).astype(jnp.float32) for x in (q, k, v))
        q = q.reshape(rows, length, k.shape[2], -1, q.shape[3])
        precision = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("rihgd,rjhd->rhgij", q * scale, k, precision=precision)
        index = jnp.arange(length, dtype=jnp.int32)
        seen = (index[None, :] <= index[:, None])[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("rhgij,rjhd->rihgd", weights, v, precision=precision)
        return out.reshape(rows * length, -1, v.shape[3]).astype(self.kv[layer][1].dtype)
