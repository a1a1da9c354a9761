"""What proposes drafts inside the program of a round. Drafts that the host proposes: `host.drafts`."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int32

from mambacache_jax.device import Pools
from mambacache_jax.spec.tree import DraftTree


@runtime_checkable
class DeviceDraft(Protocol):
    """Proposes drafts for the rows of a round, traced into its program. It writes no pool.

    A draft model with recurrent layers would need its own states rolled back; there is no place for them.

    Attributes:
      depth: most nodes of a path, the bonus token included.
      num_nodes: nodes of a verify tree, the bonus token included.
    """

    @property
    def depth(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    def propose(
        self,
        params: Any,
        pools: Pools,
        row: Int32[Array, " row"],
        bonus: Int32[Array, " row"],
        hidden: Float[Array, "row size"],
        kv_len: Int32[Array, " row"],
    ) -> DraftTree:
        """Verify trees with the bonus tokens at node 0.

        Args:
          params: of the target, and of the draft with it.
          pools: with K and V of all tokens before the bonus token.
          row: request-table rows; 0 for padding.
          bonus: the token that each row sampled last.
          hidden: the target's hidden vector of the token before it.
          kv_len: position of the bonus token.
        """
        ...
