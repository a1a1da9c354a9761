"""`grouped_matmul`: rows sorted by group, each group with a matrix of its own."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int32

from kernels_pallas.grouped_matmul import blocks, ragged, reference

_IMPLEMENTATIONS: dict[str, Callable] = {
    "blocks": blocks.grouped_matmul,
    "ragged_dot": ragged.grouped_matmul,
    "reference": reference.grouped_matmul,
}


def grouped_matmul(
    x: Float[Array, "row in"],
    weight: Float[Array, "group in out"],
    sizes: Int32[Array, " group"],
    *,
    implementation: str | None = None,
) -> Float[Array, "row out"]:
    """`x[r] @ weight[group of r]`; no row is dropped, however uneven the groups are.

    Args:
      x: rows, those of group 0 first, then those of group 1, and so on.
      weight: one matrix a group, in the dtype of `x`.
      sizes: rows of each group; they sum to the number of rows.
      implementation: "blocks" (a loop over blocks of rows; holds little beside the result), "ragged_dot"
        (XLA's op, which on CPU and GPU grows by the number of groups) or "reference" (every row with every
        matrix). None takes "ragged_dot" on TPU and "blocks" elsewhere. A named one never falls back.

    Returns:
      The products in the dtype of `x`; those of float32 are float32 on every platform.

    Raises:
      ValueError: an unknown implementation.
    """
    if implementation is None:
        return jax.lax.platform_dependent(
            x, weight, sizes, tpu=ragged.grouped_matmul, default=blocks.grouped_matmul
        )
    if implementation not in _IMPLEMENTATIONS:
        known = ", ".join(_IMPLEMENTATIONS)
        raise ValueError(f"grouped_matmul: unknown implementation {implementation!r}; there are {known}.")
    return _IMPLEMENTATIONS[implementation](x, weight, sizes)
