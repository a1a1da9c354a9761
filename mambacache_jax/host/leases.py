"""What keeps prefixes from eviction: the leases of requests, and pins. This is one part of `PrefixCache`."""

import math

from mambacache_jax.host.namespace import AnyNamespace, Every
from mambacache_jax.host.node import Node
from mambacache_jax.host.pins import Pins
from mambacache_jax.host.results import Inserted, Lease, Match
from mambacache_jax.host.shard import Shards


class Leases:
    """Locks on the nodes of some shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._pins = Pins()

    def lock(self, where: Match | Inserted, ssm: bool = True) -> Lease:
        """Keeps what a match or an insert found from eviction, until `unlock`.

        The KV of the node's path is held. With `ssm` the checkpoint at its end is locked too, and so is one
        that a tombstone gets while the lease lasts; without, the checkpoint may be evicted under the lease.

        Raises:
          ValueError: the node, or the checkpoint that a match named, has been evicted since; or it is a match
            of KV alone, or of another cache.
        """
        node, shard = where.node, where.shard
        if node is None:
            return Lease(None, False, shard, where.key)
        root = node.root
        tree = self._shards[shard].tree
        if node.removed or root.removed or root.owner is not tree:
            raise ValueError(
                f"{node} has been evicted since it was found, or is another cache's: match again, and lock "
                f"at once."
            )
        if ssm:
            if type(where) is Match and node.checkpoint_slot != where.checkpoint_slot:
                self._raise_no_checkpoint(node, where)
            tree.lock_checkpoint(node)
        tree.hold(node)
        # A match of KV alone may leave its node inside; the tokens are not those of the whole path then.
        inside = type(where) is Match and where.prefix_len != node.position
        return Lease(node, ssm, shard, b"" if inside else where.key)

    def renew(self, lease: Lease, where: Match | Inserted, ssm: bool = True) -> Lease:
        """Moves a lease on to what a match or an insert found: `lock`, then `unlock` of what it held before.

        After an insert this saves the second match: the tree has just said which node it is.

        Returns:
          The same lease.

        Raises:
          ValueError: as `lock` and `unlock`; the lease holds what it held.
        """
        self._check_held(lease)
        new = self.lock(where, ssm)
        self._release(lease)
        lease.node, lease.ssm, lease.shard, lease.key = new.node, new.ssm, new.shard, new.key
        return lease

    def relax(self, lease: Lease) -> Lease:
        """Releases a lease's checkpoint lock and keeps its KV lock; returns the same lease."""
        self._check_held(lease)
        if lease.ssm and lease.node is not None:
            self._shards[lease.shard].tree.unlock_checkpoint(lease.node)
        lease.ssm = False
        return lease

    def unlock(self, lease: Lease) -> None:
        """Releases exactly what the lease locked.

        Raises:
          ValueError: it has been released already, is a pin, or is another cache's.
        """
        self._check_held(lease)
        self._release(lease)
        lease.released = True

    def pin(self, where: Match | Inserted, expires_at: float | None = None, ssm: bool = True) -> Lease:
        """Keeps a prefix without a request that holds it, such as a system prompt's.

        Args:
          where: what a match or an insert found.
          expires_at: when `expire` ends it, in whatever time the caller counts; None for never.
          ssm: keep the checkpoint too.

        Returns:
          A lease for `unpin`. The cache holds it; the caller may forget it.

        Raises:
          ValueError: as `lock`, or there is nothing to pin, or `expires_at` is no number.
        """
        if where.node is None:
            raise ValueError("There is nothing to pin: no prefix was matched or inserted.")
        if expires_at is not None and math.isnan(expires_at):
            raise ValueError("expires_at must be a number, got nan.")
        lease = self.lock(where, ssm)
        lease.pinned = True
        where.node.root.pins += 1
        self._pins.add(lease, expires_at)
        return lease

    def unpin(self, lease: Lease) -> bool:
        """Ends a pin; False if it had ended already, by time or by a reset.

        Raises:
          ValueError: the lease is no pin of this cache.
        """
        if not lease.pinned:
            raise ValueError(f"{lease} is no pin; give it back with unlock.")
        if lease.released:
            return False
        if not self._pins.remove(lease):
            raise ValueError(f"{lease} is a pin of another cache.")
        self._end_pin(lease)
        return True

    def expire(self, now: float) -> int:
        """Ends the pins whose time has come, in the time that `pin` was given; returns how many."""
        ended = self._pins.due(now)
        for lease in ended:
            self._end_pin(lease)
        return len(ended)

    def _raise_no_checkpoint(self, node: Node, where: Match) -> None:
        if not where.checkpoint_slot:
            raise ValueError("A match of KV alone has no checkpoint to lock: lock it with ssm=False.")
        raise ValueError(
            f"The checkpoint in slot {where.checkpoint_slot} at position {node.position} has been "
            f"evicted since it was found: match again, and lock at once."
        )

    def _check_held(self, lease: Lease) -> None:
        if lease.released:
            raise ValueError(f"{lease} has been released already.")
        if lease.pinned:
            raise ValueError(f"{lease} is a pin: end it with unpin.")
        node = lease.node
        if node is not None and node.root.owner is not self._shards[lease.shard].tree:
            raise ValueError(f"{lease} is another cache's.")

    def _release(self, lease: Lease) -> None:
        node = lease.node
        if node is None:
            return
        tree = self._shards[lease.shard].tree
        if lease.ssm:
            tree.unlock_checkpoint(node)
        tree.release(node)

    def _end_pin(self, lease: Lease) -> None:
        assert lease.node is not None, "a pin holds a node."
        lease.node.root.pins -= 1
        self._release(lease)
        lease.released = True

    def _end_pins(self, namespace: AnyNamespace | Every, shard: int | None) -> None:
        for lease in self._pins.within(namespace):
            if shard is None or lease.shard == shard:
                self._pins.remove(lease)
                self._end_pin(lease)
