"""Counts compilations of this process, so that a recompile is an error and not a slow step."""

import contextlib
import functools
from collections.abc import Iterator

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


@functools.cache
def _counter() -> list[int]:
    """The count, in a list of one; the listener is registered on first use, since it cannot be removed."""
    count = [0]

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            count[0] += 1

    jax.monitoring.register_event_duration_secs_listener(on_event)
    return count


def num_compiles() -> int:
    """Programs that JAX has compiled in this process since this was first called."""
    return _counter()[0]


@contextlib.contextmanager
def assert_no_recompile() -> Iterator[None]:
    """Raises AssertionError at exit if JAX compiled anything inside the block, in any thread."""
    before = num_compiles()
    yield
    compiled = num_compiles() - before
    assert not compiled, f"{compiled} programs were compiled where none should be. Warm up the shapes first."
