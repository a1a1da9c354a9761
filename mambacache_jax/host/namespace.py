"""Who may share a prefix: the same tokens under another namespace are another prefix.

A state depends on the weights that made it, and whom it may be shown to can depend on a tenant. Both are told
apart by a namespace: None (the default), a string, bytes, an integer, or a `Namespace`.
"""

import dataclasses
import enum
from typing import Final


class _Every(enum.Enum):
    EVERY = "every namespace"


EVERY: Final = _Every.EVERY
"""Stands for all namespaces where one may be named."""

Every = _Every


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """An adapter, a cache salt and a version of the weights, kept apart: no two of them can be mixed up.

    Attributes:
      adapter: name or number of the adapter (LoRA) that the prefix was computed with; None for none.
      salt: what separates tenants that must not see each other's hits; None for none.
      version: of the weights, where they change while the server runs.
    """

    adapter: str | int | None = None
    salt: str | None = None
    version: int = 0

    def __post_init__(self) -> None:
        if type(self.adapter) not in (str, int, type(None)):
            raise ValueError(f"adapter must be a str, an int or None, got {self.adapter!r}.")
        if type(self.salt) not in (str, type(None)):
            raise ValueError(f"salt must be a str or None, got {self.salt!r}.")
        if type(self.version) is not int:
            raise ValueError(f"version must be an int, got {self.version!r}.")


AnyNamespace = None | str | bytes | int | Namespace


def check_namespace(namespace: object) -> None:
    """Raises ValueError unless this can be a namespace.

    Only types whose values equal none of another type are let in: `True == 1` would share prefixes.
    """
    if type(namespace) not in (type(None), str, bytes, int, Namespace):
        raise ValueError(
            f"A namespace is None, a str, bytes, an int or a Namespace, got {namespace!r} "
            f"of type {type(namespace).__name__}."
        )
