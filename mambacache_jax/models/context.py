"""What a model asks of its surroundings: everything that has state is behind these three calls."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Float32, Int32


@runtime_checkable
class Context(Protocol):
    """Where the states of a model's layers live during one forward pass.

    Tokens are flat. Which of them belong to one sequence, in what order, and what came before them, only
    the context knows. `layer` is the index of the calling layer in the model's `specs`; each layer calls
    `attend`, or `conv` and then `recur`, exactly once a pass.

    Attributes:
      positions: position of each token in its own sequence.
    """

    positions: Int32[Array, " token"]

    def conv(
        self,
        layer: int,
        x: Float[Array, "token channel"],
        weight: Float[Array, "channel width"],
        bias: Float[Array, " channel"] | None,
    ) -> Float[Array, "token channel"]:
        """The causal depthwise conv, without activation; tap `width - 1` is the present token."""
        ...

    def recur(
        self,
        layer: int,
        q: Float[Array, "token key_head state_dim"],
        k: Float[Array, "token key_head state_dim"],
        v: Float[Array, "token head head_dim"],
        log_decay: Float[Array, "token head *state_dim"],
        beta: Float[Array, "token head"] | None,
    ) -> Float32[Array, "token head head_dim"]:
        """The recurrence of the layer's kind; arguments as in `kernels_pallas.ssm_scan`."""
        ...

    def attend(
        self,
        layer: int,
        q: Float[Array, "token q_head head_dim"],
        k: Float[Array, "token kv_head head_dim"],
        v: Float[Array, "token kv_head v_head_dim"] | None,
        scale: float,
    ) -> Float[Array, "token q_head _"]:
        """Causal attention; keeps `k` (rotated) and `v`. Query head `h` reads KV head `h // group`.

        `v` is None for a layer whose spec says `values_in_keys`.
        """
        ...
