"""Mixture of experts: each token through the few experts that a router chooses, none dropped."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.grouped_matmul import grouped_matmul
from mambacache_jax.models.layers.linear import Linear
from mambacache_jax.models.layers.mlp import SquaredReLU, SwiGLU

Scores = Literal["softmax", "softmax_of_best", "sigmoid"]


class Router(nnx.Module):
    """Chooses experts and their weights, in float32 whatever the model's dtype.

    Attributes:
      weight: `[in, expert]`.
      bias: added to the scores when experts are chosen, not to their weights; None: no such.
    """

    def __init__(
        self,
        size: int,
        *,
        num_experts: int,
        num_chosen: int,
        scores: Scores,
        normalised: bool = True,
        bias: bool = False,
        num_groups: int = 1,
        num_chosen_groups: int = 1,
        factor: float = 1.0,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the router.

        Args:
          size: channels of a token.
          num_experts: experts to choose from, a multiple of `num_groups`.
          num_chosen: experts of a token.
          scores: "softmax" over all experts, "softmax_of_best" over those chosen (Granite), or "sigmoid".
          normalised: the weights of a token's experts sum to one.
          bias: the router has one.
          num_groups: experts are split into so many groups, of which a token's come from a few.
          num_chosen_groups: those few; a group counts as the sum of its two best.
          factor: on all weights.
          rngs: seeds.
        """
        self.num_chosen, self.scores, self.normalised = num_chosen, scores, normalised
        self.num_groups, self.num_chosen_groups, self.factor = num_groups, num_chosen_groups, factor
        drawn = jax.random.normal(rngs.params(), (size, num_experts), jnp.float32)
        self.weight = nnx.Param(drawn / math.sqrt(size))
        self.bias = nnx.Param(jnp.zeros((num_experts,), jnp.float32)) if bias else None

    def __call__(
        self, x: Float[Array, "token size"]
    ) -> tuple[Float32[Array, "token chosen"], Int32[Array, "token chosen"]]:
        """The weights and the numbers of each token's experts, best first."""
        logits = jnp.matmul(x.astype(jnp.float32), self.weight[...], precision=jax.lax.Precision.HIGHEST)
        if self.scores == "softmax_of_best":
            best, chosen = jax.lax.top_k(logits, self.num_chosen)
            return jax.nn.softmax(best, axis=-1) * self.factor, chosen
        score = jax.nn.softmax(logits, axis=-1) if self.scores == "softmax" else jax.nn.sigmoid(logits)
        choice = score if self.bias is None else score + self.bias[...][None]
        if self.num_groups > 1:
            choice = jnp.where(self._allowed(choice), choice, -jnp.inf)
        _, chosen = jax.lax.top_k(choice, self.num_chosen)
        weights = jnp.take_along_axis(score, chosen, axis=-1)
        if self.normalised:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * self.factor, chosen

    def _allowed(self, choice: Float[Array, "token expert"]) -> Array:
        """Which experts are in the best groups."""
        grouped = choice.reshape(choice.shape[0], self.num_groups, -1)
        of_group = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
        _, best = jax.lax.top_k(of_group, self.num_chosen_groups)
        inside = jax.nn.one_hot(best, self.num_groups, dtype=jnp.bool_).any(axis=1)
        return jnp.repeat(inside, grouped.shape[2], axis=1)


class MoE(nnx.Module):
    """Routed experts, and what every token goes through beside them.

    Experts are SwiGLU layers (`gate_up` and `down`, gate first), or squared-ReLU ones, without biases.

    Attributes:
      first: `[expert, in, hidden]`, twice as wide for SwiGLU.
      last: `[expert, hidden, in]`.
    """

    def __init__(
        self,
        size: int,
        hidden_size: int,
        router: Router,
        *,
        gated: bool = True,
        shared: SwiGLU | SquaredReLU | None = None,
        shared_gate: Linear | None = None,
        narrow: Linear | None = None,
        widen: Linear | None = None,
        dtype: jnp.dtype | type = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layer.

        Args:
          size: channels of what experts take and give: the model's, or those of `narrow`.
          hidden_size: channels inside an expert.
          router: chooses, from the layer's input.
          gated: experts are SwiGLU layers, else squared-ReLU ones.
          shared: added for every token.
          shared_gate: one number a token, whose sigmoid multiplies `shared`.
          narrow: maps the input to `size` before the experts.
          widen: maps their sum back.
          dtype: of the experts.
          rngs: seeds.
        """
        num_experts = router.weight.shape[1]
        self.router, self.gated, self.shared, self.shared_gate = router, gated, shared, shared_gate
        self.narrow, self.widen = narrow, widen
        wide = 2 * hidden_size if gated else hidden_size
        first = jax.random.normal(rngs.params(), (num_experts, size, wide), jnp.float32)
        last = jax.random.normal(rngs.params(), (num_experts, hidden_size, size), jnp.float32)
        self.first = nnx.Param((first / math.sqrt(size)).astype(dtype))
        self.last = nnx.Param((last / math.sqrt(hidden_size)).astype(dtype))

    def __call__(self, x: Float[Array, "token size"]) -> Float[Array, "token size"]:
        """Maps each token; what other tokens choose does not matter to it."""
        weights, chosen = self.router(x)
        out = self._routed(x if self.narrow is None else self.narrow(x), weights, chosen)
        out = out if self.widen is None else self.widen(out)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else shared * jax.nn.sigmoid(self.shared_gate(x)))

    def _routed(
        self,
        x: Float[Array, "token size"],
        weights: Float32[Array, "token chosen"],
        chosen: Int32[Array, "token chosen"],
    ) -> Float[Array, "token size"]:
        """The weighted sum of each token's experts: rows sorted by expert, and back."""
        tokens, count = chosen.shape
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.zeros((self.first.shape[0],), jnp.int32).at[expert].add(1)
        hidden = grouped_matmul(x[order // count], self.first[...], sizes)
        if self.gated:
            gate, up = jnp.split(hidden, 2, axis=-1)
            hidden = jax.nn.silu(gate) * up
        else:
            hidden = jnp.square(jax.nn.relu(hidden))
        rows = grouped_matmul(hidden, self.last[...], sizes)
        rows = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
        rows = rows.reshape(tokens, count, -1).astype(jnp.float32)
        return (rows * weights[:, :, None]).sum(axis=1).astype(x.dtype)
