"""Prefixes that stay without a request, and for how long."""

import heapq
import itertools
import math

from mambacache_jax.host.namespace import EVERY, AnyNamespace, Every
from mambacache_jax.host.results import Lease


class Pins:
    """The leases of pins, by when they end. Time is whatever the caller counts in."""

    def __init__(self) -> None:
        self._leases: dict[Lease, float] = {}
        self._heap: list[tuple[float, int, Lease]] = []
        self._order = itertools.count()

    def add(self, lease: Lease, expires_at: float | None) -> None:
        """Keeps a lease until `expires_at`, or until it is taken out."""
        when = math.inf if expires_at is None else expires_at
        self._leases[lease] = when
        if when != math.inf:
            heapq.heappush(self._heap, (when, next(self._order), lease))

    def remove(self, lease: Lease) -> bool:
        """Takes a lease out; whether it was there."""
        return self._leases.pop(lease, None) is not None

    def due(self, now: float) -> list[Lease]:
        """Takes out the leases that end at `now` or before, in order of their ends."""
        ended = []
        while self._heap and self._heap[0][0] <= now:
            _, _, lease = heapq.heappop(self._heap)
            if self.remove(lease):
                ended.append(lease)
        return ended

    def within(self, namespace: AnyNamespace | Every) -> list[Lease]:
        """The leases in a namespace; they stay."""
        return [
            lease
            for lease in self._leases
            if namespace is EVERY or (lease.node is not None and lease.node.root.namespace == namespace)
        ]
