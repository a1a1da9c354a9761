"""Who may share a prefix: the same tokens under another namespace are another prefix.

A state depends on the weights that made it, and whom it may be shown to can depend on a tenant. Both are told
apart by a namespace: None (the default), a string, bytes, an integer, or a `Namespace`.
"""

import enum
from typing import Final, NamedTuple, Self


class _Every(enum.Enum):
    EVERY = "every namespace"


EVERY: Final = _Every.EVERY
"""Stands for all namespaces where one may be named."""

Every = _Every


class _Fields(NamedTuple):
    adapter: str | int | None
    salt: str | None
    version: int


class Namespace(_Fields):
    """An adapter, a cache salt and a version of the weights, kept apart: no two of them can be mixed up.

    Attributes:
      adapter: name or number of the adapter (LoRA) that the prefix was computed with; None for none.
      salt: what separates tenants that must not see each other's hits; None for none.
      version: of the weights, where they change while the server runs.
    """

    __slots__ = ()

    def __new__(cls, adapter: str | int | None = None, salt: str | None = None, version: int = 0) -> Self:
        """Raises ValueError for anything that could equal a value of another type."""
        if type(adapter) not in (str, int, type(None)):
            raise ValueError(f"adapter must be a str, an int or None, got {adapter!r}.")
        if type(salt) not in (str, type(None)):
            raise ValueError(f"salt must be a str or None, got {salt!r}.")
        if type(version) is not int:
            raise ValueError(f"version must be an int, got {version!r}.")
        return super().__new__(cls, adapter, salt, version)


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
