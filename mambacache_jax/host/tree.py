"""The radix tree: which prefixes exist, where their KV and checkpoints lie, and what may be evicted.

It knows slots only as numbers; `PrefixCache` owns the allocators. Three rules keep it fast. A walk does one
dictionary look-up and one `startswith` a node. A use stamps one node: a parent takes a child's stamp when the
child goes, which gives leaves the same order as stamping whole paths would. A lock climbs only to the first
ancestor that is held already, so what may be evicted is known without counting.
"""

from collections.abc import Iterator

from mambacache_jax.host.key import TOKEN_BYTES, common_len
from mambacache_jax.host.lru import CheckpointOrder, LeafQueue
from mambacache_jax.host.namespace import AnyNamespace
from mambacache_jax.host.node import Node, Root
from mambacache_jax.host.stats import Counts


class RadixTree:
    """Nodes by namespace, their locks and recency.

    Attributes:
      roots: by namespace, while they have children.
      checkpoints: the nodes that have one, in order of eviction.
      num_nodes: nodes, roots left out.
      num_kv: KV slots of all nodes.
      protected_kv: of those, slots that a lease keeps from eviction.
      protected_ssm: checkpoints that a lease keeps from eviction.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._clock = 0
        self.clear()

    def clear(self) -> None:
        """Drops every node. The counter of uses goes on, so old and new stamps never meet."""
        self.roots: dict[AnyNamespace, Root] = {}
        self.checkpoints = CheckpointOrder()
        self._leaves = LeafQueue()
        self.num_nodes = self.num_kv = self.protected_kv = self.protected_ssm = 0

    def nodes(self, root: Root | None = None) -> Iterator[Node]:
        """Every node below `root`, or of the whole tree, parents first; no roots."""
        stack: list[Node] = list(self.roots.values()) if root is None else [root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(reversed(node.children.values()))

    def walk(self, key: bytes, end: int, start: Node | None) -> tuple[list[Node], Node | None, int]:
        """Follows `key[:end]` from the end of `start`, a root or a node of the key's path; `end` in bytes.

        Returns:
          The nodes that the key runs through to their end; the node in which it ends or leaves the tree, or
          None; and the tokens that it shares with the tree, whole pages.
        """
        path: list[Node] = []
        if start is None:
            return path, None, 0
        at, page_bytes, children = start.position * TOKEN_BYTES, self._page_bytes, start.children
        while at < end:
            node = children.get(key[at : at + page_bytes])
            if node is None:
                break
            tokens = node.tokens
            if not key.startswith(tokens, at, end):
                shared = at // TOKEN_BYTES + common_len(key, at, end, tokens)
                return path, node, shared - shared % self._page_size
            path.append(node)
            at += len(tokens)
            children = node.children
        return path, None, at // TOKEN_BYTES

    def touch(self, node: Node) -> None:
        """Makes a node the most recently used, and its checkpoint likewise."""
        self._clock += 1
        node.stamp = self._clock
        if node.checkpoint_slot:
            self.checkpoints.move_to_end(node)

    def split(self, node: Node, position: int) -> Node:
        """Cuts a node's run at `position`; returns the new upper node, a tombstone.

        The node itself becomes the lower part and keeps checkpoint, children and leases, so whoever holds it
        still holds the same tokens.
        """
        parent = node.parent
        assert parent is not None, "a root has no run to split."
        cut = (position - parent.position) * TOKEN_BYTES
        upper = Node(node.tokens[:cut], node.kv[:cut], parent, position, node.stamp)
        parent.add_child(self._first_page(upper), upper)
        node.tokens, node.kv, node.parent = node.tokens[cut:], node.kv[cut:], upper
        upper.add_child(self._first_page(node), node)
        upper.held = 1 if node.held else 0
        self.num_nodes += 1
        return upper

    def add_leaf(self, parent: Node, tokens: bytes, kv: bytes) -> Node:
        """Hangs a new leaf, the most recently used node, under `parent`; `kv` are its slots, as int32."""
        self._clock += 1
        count = len(tokens) // TOKEN_BYTES
        leaf = Node(tokens, kv, parent, parent.position + count, self._clock)
        parent.add_child(tokens[: self._page_bytes], leaf)
        self.num_nodes += 1
        self.num_kv += count
        self._leaves.push(leaf)
        return leaf

    def root(self, namespace: AnyNamespace, counts: Counts) -> Root:
        """The root of a namespace, made with these counts if need be; a node must follow."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, counts, self)
        return root

    def hold(self, node: Node) -> None:
        """Keeps a node and its ancestors from eviction, until `release`."""
        node.root.leases += 1
        end = node.position
        while (parent := node.parent) is not None:
            node.held += 1
            if node.held > 1:
                break
            node = parent
        # What was not held before lies in one piece, below `node`.
        self.protected_kv += end - node.position

    def release(self, node: Node) -> None:
        """Undoes one `hold`."""
        node.root.leases -= 1
        leaf, end = node, node.position
        while (parent := node.parent) is not None:
            node.held -= 1
            if node.held:
                break
            node = parent
        self.protected_kv -= end - node.position
        if node is not leaf and not leaf.children:
            self._leaves.push(leaf)

    def lock_checkpoint(self, node: Node) -> None:
        """Keeps a node's checkpoint from eviction, now or as soon as it gets one. The node must be held."""
        node.ssm_lock += 1
        if node.ssm_lock == 1 and node.checkpoint_slot:
            self.protected_ssm += 1

    def unlock_checkpoint(self, node: Node) -> None:
        """Undoes one `lock_checkpoint`."""
        node.ssm_lock -= 1
        if not node.ssm_lock and node.checkpoint_slot:
            self.protected_ssm -= 1

    def set_checkpoint(self, node: Node, slot: int) -> None:
        """Gives a tombstone a checkpoint, which is protected at once if the node's is locked."""
        node.checkpoint_slot = slot
        self.checkpoints[node] = None
        if node.ssm_lock:
            self.protected_ssm += 1

    def drop_checkpoint(self, node: Node) -> int:
        """Makes a node a tombstone; returns its slot. The checkpoint must not be locked."""
        slot, node.checkpoint_slot = node.checkpoint_slot, 0
        del self.checkpoints[node]
        return slot

    def pop_leaves(self, num_kv: int) -> list[Node]:
        """Takes the least recently used leaves that nobody holds out of the tree.

        A parent left without children is a leaf from then on, as recent as its children were. The slots of
        what is taken, those of checkpoints too, are still to be freed.

        Args:
          num_kv: stop when the leaves taken have so many KV slots.
        """
        popped: list[Node] = []
        leaves, page_bytes, freed = self._leaves, self._page_bytes, 0
        while freed < num_kv and (leaf := leaves.pop()) is not None:
            parent = leaf.parent
            assert parent is not None, "a root was queued for eviction."
            popped.append(leaf)
            freed += leaf.position - parent.position
            parent.remove_child(leaf.tokens[:page_bytes])
            leaf.parent, leaf.removed = None, True
            if leaf.checkpoint_slot:
                del self.checkpoints[leaf]
            parent.stamp = max(parent.stamp, leaf.stamp)
            if not parent.children:
                if parent.parent is None:
                    del self.roots[leaf.root.namespace]
                elif not parent.held:
                    leaves.push(parent)
        self.num_nodes -= len(popped)
        self.num_kv -= freed
        return popped

    def remove_root(self, root: Root, nodes: list[Node]) -> None:
        """Takes a namespace out of the tree, in which nothing is held; `nodes` are all below its root."""
        root.removed = True
        for node in nodes:
            node.removed = True
            if node.checkpoint_slot:
                del self.checkpoints[node]
            self.num_kv -= len(node.kv) // TOKEN_BYTES
        self.num_nodes -= len(nodes)
        del self.roots[root.namespace]
        self._leaves.purge()

    def reorder(self, nodes: list[Node], stamps: list[int], ranks: list[int]) -> None:
        """Gives all nodes the recency that another tree had; `ranks` is that of their checkpoints."""
        self._clock = max(stamps, default=0)
        for node, stamp in zip(nodes, stamps, strict=True):
            node.stamp = stamp
        for _, node in sorted(
            (rank, node) for rank, node in zip(ranks, nodes, strict=True) if node.checkpoint_slot
        ):
            self.checkpoints.move_to_end(node)
        self._leaves.refresh()

    def check_invariants(self) -> None:
        """Raises AssertionError unless links, keys, locks, sums and orders of eviction all agree."""
        nodes = list(self.nodes())
        for namespace, root in self.roots.items():
            assert root.namespace == namespace, f"the root of {namespace!r} says {root.namespace!r}."
            assert root.children, f"the root of {namespace!r} is empty and still there."
            state = (root.position, root.checkpoint_slot, root.held, root.ssm_lock, root.parent)
            assert state == (0, 0, 0, 0, None), f"the root of {namespace!r} is {state}."
            self._check_children(root)
            below = list(self.nodes(root))
            assert all(node.root is root for node in below), f"a node below {namespace!r} has another root."
            leases = sum(node.held - sum(1 for c in node.children.values() if c.held) for node in below)
            assert leases == root.leases, f"{leases} leases counted below {namespace!r}, not {root.leases}."
            assert 0 <= root.pins <= leases, f"{root.pins} pins and {leases} leases below {namespace!r}."
        for node in nodes:
            self._check_node(node)
            self._check_children(node)
        with_checkpoint = {node for node in nodes if node.checkpoint_slot}
        assert set(self.checkpoints) == with_checkpoint, "the order of checkpoints misses or keeps a node."
        queue = self._leaves.nodes()
        assert len(queue) == len(set(queue)), "a node is queued twice."
        assert set(queue) == {node for node in nodes if node.queued}, "the queue of leaves misses a node."
        for node in nodes:
            free_leaf = not node.children and not node.held
            assert node.queued or not free_leaf, f"{node} can be evicted and is not queued."
        counted = (
            len(nodes),
            sum(len(node.kv) for node in nodes) // TOKEN_BYTES,
            sum(len(node.kv) for node in nodes if node.held) // TOKEN_BYTES,
            sum(1 for node in with_checkpoint if node.ssm_lock),
        )
        kept = (self.num_nodes, self.num_kv, self.protected_kv, self.protected_ssm)
        assert kept == counted, f"nodes, KV, protected KV and checkpoints are {kept}, counted {counted}."

    def _check_node(self, node: Node) -> None:
        assert node.parent is not None
        assert not node.removed, f"{node} is in the tree and marked as removed."
        tokens = len(node.tokens) // TOKEN_BYTES
        assert tokens, f"{node} has an empty run."
        assert tokens % self._page_size == 0, f"{node} has a run of {tokens} tokens, no whole pages."
        assert len(node.kv) == len(node.tokens), f"{node} has {tokens} tokens."
        assert node.position == node.parent.position + tokens, f"{node} is not where its parent ends."
        held_children = sum(1 for child in node.children.values() if child.held)
        assert node.held >= held_children, f"{node} is held {node.held} times, its children {held_children}."
        assert node.ssm_lock >= 0, f"{node} has a checkpoint lock of {node.ssm_lock}."
        leases = node.held - held_children
        assert leases >= node.ssm_lock, f"{node} has {node.ssm_lock} checkpoint locks and {leases} leases."

    def _check_children(self, node: Node) -> None:
        for page, child in node.children.items():
            assert child.parent is node, f"{child} is a child of {node} and says {child.parent}."
            assert page == self._first_page(child), f"{child} is filed under another page than its first."

    def _first_page(self, node: Node) -> bytes:
        return node.tokens[: self._page_bytes]
