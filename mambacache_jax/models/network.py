"""The network that every family fills in: embedding, blocks, a last norm, a head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from mambacache_jax.config import LayerSpec
from mambacache_jax.models.context import Context
from mambacache_jax.models.layers import Attend, Block, Embedding, Linear, MoE, MTPBlock, RMSNorm


class HybridLM(nnx.Module):
    """A language model of blocks, and optionally a multi-token-prediction block.

    Attributes:
      specs: what each mixer keeps, in the order in which they run.
      mtp_layer: index in `specs` of the attention layer whose K and V the draft block reads; None: no such.
    """

    def __init__(
        self,
        embedding: Embedding,
        layers: list[Block],
        norm: RMSNorm,
        head: Linear | None,
        *,
        embedding_multiplier: float = 1.0,
        logits_multiplier: float = 1.0,
        mtp: MTPBlock | None = None,
        mtp_layer: int | None = None,
    ) -> None:
        """Puts the parts together.

        Args:
          embedding: token ids to vectors.
          layers: the blocks.
          norm: after the last block.
          head: vectors to logits; None takes the embedding's table (tied weights).
          embedding_multiplier: factor on embedded tokens.
          logits_multiplier: factor on logits.
          mtp: the draft block.
          mtp_layer: see the attributes.
        """
        self.embedding = embedding
        self.layers = nnx.List(layers)
        self.norm = norm
        self.head = head
        self.mtp = mtp
        self.embedding_multiplier, self.logits_multiplier = embedding_multiplier, logits_multiplier
        self.specs: tuple[LayerSpec, ...] = tuple(spec for block in layers for spec in block.specs)
        self.mtp_layer = mtp_layer

    @property
    def widest(self) -> int:
        """The most channels that a layer makes of a token: those of a map, or into and inside its experts."""
        widths = [0]
        for layer in self.layers:
            for _, module in nnx.iter_modules(layer):
                if isinstance(module, Linear):
                    widths.append(module.weight.shape[1])
                elif isinstance(module, MoE):
                    widths.append(module.router.num_chosen * sum(module.first.shape[1:]))
        return max(widths)

    def hidden(self, tokens: Int32[Array, " token"], ctx: Context) -> Float[Array, "token size"]:
        """See `Model.hidden`."""
        x, layer = self._embedded(tokens), 0
        for block in self.layers:
            x = block(x, ctx, layer)
            layer += len(block.specs)
        return self.norm(x)

    def logits(self, hidden: Float[Array, "*batch size"]) -> Float32[Array, "*batch vocab"]:
        """See `Model.logits`."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.head is None:
            table = self.embedding.weight[...]
            flat = jnp.einsum("ts,vs->tv", flat, table, precision=jax.lax.Precision.HIGHEST)
        else:
            flat = self.head(flat)
        flat = flat.astype(jnp.float32) * self.logits_multiplier
        return flat.reshape(*hidden.shape[:-1], -1)

    def mtp_step(
        self,
        tokens: Int32[Array, " row"],
        hidden: Float[Array, "row size"],
        positions: Int32[Array, " row"],
        attend: Attend,
    ) -> Float[Array, "row size"]:
        """See `Model.mtp_step`."""
        assert self.mtp is not None
        return self.mtp(self._embedded(tokens), hidden, positions, attend)

    def _embedded(self, tokens: Int32[Array, " token"]) -> Float[Array, "token size"]:
        return self.embedding(tokens) * self.embedding_multiplier
