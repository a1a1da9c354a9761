"""Plants faults in the prefix cache, one at a time in a copy, and shows that the tests notice each.

Two kinds: the faults below, each of which some cache of this kind has had or could have, and the removal of
every single check of `check_invariants()`. An `assert` without a message is there for the type checker and
is no check. Run it as `make mutants`, or name the faults to plant; the exit status is 1 if one survives.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HOST = "mambacache_jax/host"
CHECKED = ("tree", "allocator", "shard", "events", "borrowed")

# A failure ends the run, so there is nothing to shrink; the top conftest.py would import jax.
CONFTEST = """
from hypothesis import Phase, settings

settings.register_profile("mutants", phases=[Phase.generate])
settings.load_profile("mutants")
"""


class Fault(NamedTuple):
    """A replacement of text that occurs exactly once in a module of the host."""

    name: str
    module: str
    old: str
    new: str


FAULTS = [
    Fault(
        "unlock decrements a lock that it never took",
        "leases",
        "        if lease.ssm:\n            tree.unlock_checkpoint(node)",
        "        if node.ssm_lock:\n            tree.unlock_checkpoint(node)",
    ),
    Fault(
        "relax decrements a lock that it never took",
        "leases",
        "if lease.ssm and lease.node is not None:",
        "if lease.node is not None:",
    ),
    Fault("relax keeps the lock", "leases", "        lease.ssm = False\n", ""),
    Fault(
        "renew keeps what it held before",
        "leases",
        "        self._release(lease)\n        lease.node",
        "        lease.node",
    ),
    Fault(
        "a stale checkpoint can be locked", "leases", "node.checkpoint_slot != where.checkpoint_slot", "False"
    ),
    Fault("a removed node can be locked", "leases", "if node.removed or ", "if "),
    Fault("a pin stays after a reset", "leases", "                self._end_pin(lease)\n", ""),
    Fault(
        "split leaves the checkpoint on the upper node",
        "tree",
        "        upper.held = 1 if node.held else 0\n",
        "        upper.held = 1 if node.held else 0\n"
        "        if node.checkpoint_slot:\n"
        "            slot, token_hash = self.drop_checkpoint(node), node.token_hash\n"
        "            node.token_hash = None\n"
        "            upper.checkpoint_slot, upper.token_hash = slot, token_hash\n"
        "            self.checkpoints[upper] = None\n",
    ),
    Fault("split forgets the lock count", "tree", "upper.held = 1 if node.held else 0", "upper.held = 0"),
    Fault(
        "split copies the lock count", "tree", "upper.held = 1 if node.held else 0", "upper.held = node.held"
    ),
    Fault("eviction removes a locked leaf", "lru", "if node.children or node.held:", "if node.children:"),
    Fault("eviction removes an inner node", "lru", "if node.children or node.held:", "if node.held:"),
    Fault(
        "eviction takes a locked checkpoint",
        "lru",
        "for node in self if not node.ssm_lock",
        "for node in self",
    ),
    Fault("a stale entry of the queue is believed", "lru", "elif stamp != node.stamp:", "elif False:"),
    Fault(
        "eviction of a checkpoint also drops KV",
        "shard",
        "            self.drop_checkpoint(node)\n            node.root.counts.ssm_evicted += 1",
        "            self.drop_checkpoint(node)\n            self._evict_leaves(1)\n"
        "            node.root.counts.ssm_evicted += 1",
    ),
    Fault(
        "an evicted leaf's checkpoint is not freed",
        "shard",
        "            self.ssm.free_one(states[0])",
        "            pass",
    ),
    Fault(
        "a freed parent keeps its child key",
        "tree",
        "            parent.remove_child(leaf.tokens[:page_bytes])\n",
        "",
    ),
    Fault(
        "a parent is filed under its whole run",
        "tree",
        "        return node.tokens[: self._page_bytes]",
        "        return node.tokens",
    ),
    Fault("a parent forgets its child's use", "tree", "parent.stamp = max(parent.stamp, leaf.stamp)", "pass"),
    Fault(
        "a parent without children is never evicted",
        "tree",
        "            elif not parent.held:\n",
        "            elif False:\n",
    ),
    Fault(
        "a released leaf is never evicted", "tree", "if node is not leaf and not leaf.children:", "if False:"
    ),
    Fault("a root stays without children", "tree", "del self.roots[leaf.root.namespace]", "pass"),
    Fault(
        "duplicate release is off by one page",
        "allocator",
        "            self.free_pages(self.validate(freed))\n",
        "            self.free_pages(self.validate(freed[: -self._page_size]))\n",
    ),
    Fault(
        "duplicate release takes a page too many",
        "shard",
        "        self.kv.exchange(duplicates, fresh)\n",
        "        self.kv.exchange(slots[: len(duplicates) and len(duplicates) + page_size], fresh)\n",
    ),
    Fault(
        "a tombstone that receives a checkpoint while locked is not protected",
        "tree",
        "        if node.ssm_lock:\n            self.protected_ssm += 1\n",
        "",
    ),
    Fault(
        "a tombstone is not locked for the checkpoint to come",
        "tree",
        "        node.ssm_lock += 1\n",
        "        node.ssm_lock += bool(node.checkpoint_slot)\n",
    ),
    Fault(
        "namespace left out of a look-up",
        "prefix_cache",
        "        root = s.root(namespace)\n        path, cut, kv_len",
        "        root = s.root(None)\n        path, cut, kv_len",
    ),
    Fault(
        "namespace left out of an insert",
        "shard",
        "            above = root = self.root(namespace)\n",
        "            above = root = self.root(None)\n",
    ),
    Fault(
        "namespace left out of a new root",
        "shard",
        "tree.root(namespace, counts)",
        "tree.root(None, counts)",
    ),
    Fault(
        "namespaces that compare equal are one",
        "shard",
        "type(root.namespace) is not type(namespace)",
        "False",
    ),
    Fault(
        "the salt is left out of a namespace",
        "namespace",
        "return super().__new__(cls, adapter, salt, version)",
        "return super().__new__(cls, adapter, None, version)",
    ),
    Fault(
        "namespace left out of a block's hash", "events", "return _seed(node.root.namespace)", "return b''"
    ),
    Fault(
        "namespace left out of a lease",
        "shard",
        "if namespace is not root.namespace and namespace != root.namespace:",
        "if False:",
    ),
    Fault(
        "an insert from a lease compares no tokens",
        "shard",
        "not _same_start(key, lease.key, end)",
        "False",
    ),
    Fault(
        "a lease that ends inside a node is taken for the whole node",
        "leases",
        "inside = type(where) is Match and where.prefix_len != node.position",
        "inside = False",
    ),
    Fault(
        "an insert takes a lease that is released",
        "shard",
        "        if lease.released:\n",
        "        if False:\n",
    ),
    Fault(
        "an insert takes a lease of another shard", "shard", "if root.owner is not self.tree:", "if False:"
    ),
    Fault(
        "the allocator hands out a view",
        "allocator",
        "pages = np.sort(self._stack[top - count : top])",
        "pages = self._stack[top - count : top]",
    ),
    Fault("a slot may be named twice", "allocator", "if np.count_nonzero(again):", "if False:"),
    Fault(
        "a slot of the tree may be given again",
        "allocator",
        "        if np.count_nonzero(wrong):\n",
        "        if False:\n",
    ),
    Fault(
        "a match hands out slots of the tree that can be written",
        "tree",
        "leaf = Node(tokens, kv, parent,",
        "leaf = Node(tokens, bytearray(kv), parent,",
    ),
    Fault(
        "a stamp is not compared",
        "shard",
        "if stamp is not None and not stamp.is_of(tokens, num_tokens):",
        "if False:",
    ),
    Fault(
        "of a stamp the position alone is compared",
        "key",
        "        return self.token_hash == hash_at(tokens, position)\n",
        "        return True\n",
    ),
    Fault(
        "of a stamp the hash alone is compared",
        "key",
        "        if self.position != position:\n            return False\n",
        "",
    ),
    Fault(
        "a checkpoint may lie inside a page",
        "shard",
        "if not num_tokens or end != num_tokens:",
        "if not num_tokens:",
    ),
    Fault(
        "recency is refreshed by a probe",
        "prefix_cache",
        "        node = path[-1]\n        return Match(",
        "        node = path[-1]\n        self._shards[shard].tree.touch(node)\n        return Match(",
    ),
    Fault(
        "recency is refreshed by a match of KV",
        "prefix_cache",
        "        return Match(kv_len, _slots_of(path)[:kv_len], 0",
        "        self._shards[shard].tree.touch(path[-1])\n"
        "        return Match(kv_len, _slots_of(path)[:kv_len], 0",
    ),
    Fault("a match does not refresh recency", "prefix_cache", "        s.tree.touch(node)\n", ""),
    Fault(
        "a match does not refresh its checkpoint",
        "tree",
        "        if node.checkpoint_slot:\n            self.checkpoints.move_to_end(node)\n",
        "",
    ),
    Fault(
        "a match ends at a node without a checkpoint",
        "prefix_cache",
        "        counts.kv_matched_tokens += kv_len\n        while path and not path[-1].checkpoint_slot:\n",
        "        counts.kv_matched_tokens += kv_len\n"
        "        while len(path) > 1 and not path[-1].checkpoint_slot:\n",
    ),
    Fault("the cap drops a locked checkpoint", "shard", " and not node.ssm_lock:", ":"),
    Fault("the cap drops a checkpoint where paths part", "shard", "len(node.children) == 1 and not", "not"),
    Fault(
        "the cap keeps one too many",
        "shard",
        "excess = len(with_state) - cap",
        "excess = len(with_state) - cap - 1",
    ),
    Fault("a pin outlives its time", "pins", "self._heap[0][0] <= now", "self._heap[0][0] < now"),
    Fault("a reset ends the pins of others", "pins", "if namespace is EVERY or ", "if True or "),
    Fault("a reset asks for no leases", "prefix_cache", "            if held:\n", "            if False:\n"),
    Fault(
        "a reset leaves nodes that can be locked",
        "tree",
        "        for node in nodes:\n            node.removed = True\n",
        "        for node in nodes:\n",
    ),
    Fault(
        "an event is lost",
        "events",
        "        self._append(BlockRemoved(self._hashes.pop(node), MEDIUM))",
        "        self._hashes.pop(node)",
    ),
    Fault(
        "a lost checkpoint is not told",
        "events",
        "        if node.checkpoint_slot:\n            self.checkpoint_removed(node)\n",
        "",
    ),
    Fault(
        "an overflow is not told", "events", "self._overflown, self._events = True, []", "self._events = []"
    ),
    Fault(
        "a split shuffles hashes",
        "events",
        "hashes[:count], hashes[count:]",
        "hashes[count:], hashes[:count]",
    ),
    Fault("recency is not saved", "storage", "                node.stamp,\n", "                0,\n"),
    Fault(
        "the order of checkpoints is not saved", "storage", "rank.get(node, 0)", "bool(node.checkpoint_slot)"
    ),
    Fault(
        "what a caller refuses is lost", "borrowed", "            del self._owed[0]\n", "            pass\n"
    ),
    Fault(
        "shards share a tree's counts",
        "prefix_cache",
        "Shard(index, config, self.kv[index], self.ssm[index])",
        "Shard(index, config, self.kv[0], self.ssm[index])",
    ),
    Fault(
        "a hash goes on from another prefix",
        "key",
        "extend_hash(marks[at], data[at * width",
        "extend_hash(marks[0], data[at * width",
    ),
    Fault(
        "a token over int32 is let in",
        "key",
        "(high := int(array.max())) > _MAX_TOKEN:",
        "(high := int(array.max())) > 2**33:",
    ),
    Fault(
        "raw bytes are not looked through",
        "key",
        "    if isinstance(tokens, bytes | bytearray) and data:\n",
        "    if False:\n",
    ),
]


def module_path(root: Path, module: str) -> Path:
    return root / HOST / f"{module}.py"


def planted(fault: Fault) -> str:
    """The module's text with the fault."""
    text = module_path(ROOT, fault.module).read_text()
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.name!r}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.module}.py.")
    return text.replace(fault.old, fault.new)


def checks(module: str) -> list[tuple[str, str]]:
    """Every check of a module's recounts, each with the module's text without it."""
    text = module_path(ROOT, module).read_text()
    lines = text.splitlines(keepends=True)
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or "check_" not in function.name:
            continue
        for node in ast.walk(function):
            if not is_check(node):
                continue
            start, end = node.lineno - 1, node.end_lineno
            indent = lines[start][: node.col_offset]
            without = [*lines[:start], f"{indent}pass\n", *lines[end:]]
            found.append((f"{module}.py {node.lineno}: {lines[start].strip()[:70]}", "".join(without)))
    return found


def is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return node.msg is not None
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    called = node.value.func
    return isinstance(called, ast.Attribute) and called.attr.lstrip("_").startswith("check_")


def copy_to(root: Path) -> None:
    """What the tests of the host need."""
    for path in (ROOT / "mambacache_jax").glob("*.py"):
        (root / "mambacache_jax").mkdir(exist_ok=True)
        shutil.copy(path, root / "mambacache_jax")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / HOST, root / HOST, ignore=ignore)
    shutil.copytree(ROOT / "tests" / "host", root / "tests" / "host", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "tests" / "conftest.py").write_text(CONFTEST)


def failure(root: Path, machines: bool) -> str | None:
    """The first test that fails in the copy, the state machines last if at all; None if all pass."""
    tests = sorted((root / "tests" / "host").glob("test_*.py"), key=lambda p: ("machine" in p.name, p.name))
    if not machines:
        tests = [path for path in tests if "machine" not in path.name]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        sys.exit(f"pytest said neither yes nor no:\n{done.stdout}{done.stderr}")
    return failed[0].split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ").split("tests/host/")[-1]


def main(names: list[str]) -> int:
    mutants = [(fault.name, fault.module, planted(fault), True) for fault in FAULTS]
    # A check is there for damage that no call can do, so a test must do the damage.
    mutants += [(name, module, text, False) for module in CHECKED for name, text in checks(module)]
    mutants = [mutant for mutant in mutants if not names or any(name in mutant[0] for name in names)]
    survivors, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_to(root)
        if (broken := failure(root, True)) is not None:
            sys.exit(f"{broken} fails without any fault.")
        for name, module, text, machines in mutants:
            path = module_path(root, module)
            whole = path.read_text()
            path.write_text(text)
            caught = failure(root, machines)
            path.write_text(whole)
            survivors += caught is None
            print(f"{name:85} {caught or 'SURVIVES'}", flush=True)
    print(f"{len(mutants)} faults, {survivors} survive, {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
