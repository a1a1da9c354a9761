"""A loaded model: what it is, its parameters, and the pure functions that run it."""

import dataclasses
from typing import Any, Literal

import jax
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from mambacache_jax.config import LayerSpec, StateDtype
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers import Attend
from mambacache_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model split once into a graph definition and parameters.

    The methods are pure functions of their arguments, to be traced; `params` is an argument so that a
    jitted step takes it as one. A model is equal only to itself, and hashable.

    Attributes:
      name: what `load` was given.
      specs: what each layer keeps, one entry a mixer, in order.
      vocab_size: token ids lie in `[0, vocab_size)`.
      max_context: most tokens of a sequence.
      eos_token_ids: tokens that end an answer.
      tokenizer: text to ids and back.
      dtype: of activations, conv windows, and K and V.
      params: the parameters, a tree of arrays; of an abstract model, of their shapes and dtypes.
      graphdef: the module without its parameters.
      mtp_layer: index in `specs` of the attention layer whose K and V `mtp_step` reads; None: no such head.
      state_dtype: how the checkpoint asks for recurrent states to be stored.
    """

    name: str
    specs: tuple[LayerSpec, ...]
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    dtype: Literal["float32", "bfloat16"]
    params: Any
    graphdef: Any
    mtp_layer: int | None = None
    state_dtype: StateDtype = "float32"

    @property
    def num_params(self) -> int:
        """Parameters, those of the multi-token-prediction head included."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    @property
    def widest(self) -> int:
        """The most channels that a layer makes of a token: those of a map, or into and inside its experts."""
        return nnx.merge(self.graphdef, self.params).widest

    def hidden(self, params: Any, tokens: Int32[Array, " token"], ctx: Context) -> Float[Array, "token size"]:
        """Runs all layers and the last norm on flat tokens; states are behind `ctx`."""
        return nnx.merge(self.graphdef, params).hidden(tokens, ctx)

    def logits(self, params: Any, hidden: Float[Array, "*batch size"]) -> Float32[Array, "*batch vocab"]:
        """The head, on what `hidden` or `mtp_step` returned."""
        return nnx.merge(self.graphdef, params).logits(hidden)

    def mtp_step(
        self,
        params: Any,
        tokens: Int32[Array, " row"],
        hidden: Float[Array, "row size"],
        positions: Int32[Array, " row"],
        attend: Attend,
    ) -> Float[Array, "row size"]:
        """One step of the multi-token-prediction head (the draft of speculative decoding).

        With `t` the last position whose K and V the target has, the first step takes token `t + 1` and the
        target's hidden vector of `t`, and its logits are for token `t + 2`. Each further step takes the
        token drafted before and the hidden vector that this returned; `positions` and K and V stay at `t`.

        Args:
          params: as for `hidden`.
          tokens: the next token of each row.
          hidden: of `hidden` at `t`, or of the step before.
          positions: `t` of each row.
          attend: `(q [row, q_head, head_dim], scale) -> [row, q_head, v_head_dim]`, causal attention of
            each row to the K and V of layer `mtp_layer` at positions up to its `t`. Queries come rotated.

        Returns:
          Hidden vectors for `logits` and for the next step.

        Raises:
          ValueError: the model has no such head.
        """
        if self.mtp_layer is None:
            raise ValueError(f"{self.name}: the model has no multi-token-prediction head.")
        return nnx.merge(self.graphdef, params).mtp_step(tokens, hidden, positions, attend)
