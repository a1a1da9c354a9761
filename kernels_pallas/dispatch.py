"""Which implementation of an op runs: the platform's order, or the one that the caller names.

An implementation raises `NotImplementedError` for what it cannot do, which means "try the next one" and
nothing else. One that was named never falls back: its error reaches the caller.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


@dataclasses.dataclass(frozen=True)
class Op:
    """An op and its implementations, which all have the same signature.

    Attributes:
      name: the op's folder in this package.
      implementations: by name.
      order: for a platform ("cpu", "gpu", "tpu"), the names that are tried when the caller gives none.
    """

    name: str
    implementations: Mapping[str, Callable]
    order: Mapping[str, tuple[str, ...]]

    def __call__(self, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        """Calls the implementation named, or the first of the platform's that can.

        Raises:
          ValueError: there is no implementation of that name.
          NotImplementedError: the one named cannot, or none can.
        """
        if implementation is not None:
            return self._find(implementation)(*args, **kwargs)
        refused = {}
        for name in self.names(current_platform()):
            try:
                return self.implementations[name](*args, **kwargs)
            except NotImplementedError as error:
                refused[name] = str(error)
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise NotImplementedError(
            f"{self.name}: no implementation for {current_platform()} takes this call. {reasons}"
        )

    def _find(self, implementation: str) -> Callable:
        if implementation not in self.implementations:
            known = ", ".join(self.implementations)
            raise ValueError(f"{self.name}: unknown implementation {implementation!r}; there are {known}.")
        return self.implementations[implementation]

    def names(self, platform: str) -> tuple[str, ...]:
        """The platform's order of implementations.

        Raises:
          ValueError: an unknown platform.
        """
        if platform not in self.order:
            known = ", ".join(self.order)
            raise ValueError(f"{self.name}: unknown platform {platform!r}; there are {known}.")
        return self.order[platform]


class Explanation(NamedTuple):
    """What `explain` found.

    Attributes:
      op: the op's name.
      platform: where it would run.
      taken: the implementation that would run, or None.
      refused: those tried before it, and why each was not taken.
    """

    op: str
    platform: str
    taken: str | None
    refused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.platform}: {self.taken or 'no implementation'}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.refused.items()])


def current_platform() -> str:
    """The platform of the abstract device that a trace is for, else that of JAX's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def explain(op: str, *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Says which implementation a call would take and why others would not; it is traced, and not compiled.

    Args:
      op: an op's name, such as "ssm_nodes".
      *args: of the op's public function; a `jax.ShapeDtypeStruct` may stand for an array.
      platform: "cpu", "gpu" or "tpu", where the call would run; by default where JAX runs.
      **kwargs: of the op's public function.

    Raises:
      ValueError: an unknown op or platform, or arguments that the op refuses on every platform.
    """
    try:
        api = importlib.import_module(f"{__package__}.{op}.api")
    except ModuleNotFoundError as error:
        raise ValueError(f"There is no op {op!r} in {__package__}.") from error
    where = platform or current_platform()
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [n for n, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def call(implementation, arrays):
        filled = [*leaves]
        for n, array in zip(traced, arrays, strict=True):
            filled[n] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        return getattr(api, op)(*args, **kwargs, implementation=implementation)

    refused: dict[str, str] = {}
    for name in api.OP.names(where):
        try:
            jax.eval_shape(functools.partial(call, name), [leaves[n] for n in traced])
        except NotImplementedError as error:
            refused[name] = str(error)
        else:
            return Explanation(op, where, name, refused)
    return Explanation(op, where, None, refused)
