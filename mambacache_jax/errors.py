"""Errors that callers are expected to catch."""


class MambaCacheError(Exception):
    """Base of the errors that this package defines."""


class OutOfSlots(MambaCacheError):
    """A pool has too few free and evictable slots. Nothing was changed; freeing slots would help."""


class StampMismatch(MambaCacheError, ValueError):
    """A checkpoint's stamp names another position or other tokens than the place it was offered for."""
