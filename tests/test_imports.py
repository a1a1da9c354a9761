"""The parts import one another only as `design.md` section 2 allows, and loading is as lazy as it says."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mambacache_jax

ROOT = Path(__file__).parents[1]

# Values and plain data that every part of `mambacache_jax` may name; they import nothing of it.
EVERYWHERE = {"config", "errors"}

ARROWS = {
    "config": set(),
    "errors": set(),
    "layout": set(),
    "host": {"layout"},
    "device": {"kernels_pallas", "layout"},
    "spec": {"device", "kernels_pallas", "layout"},
    "models": {"device", "spec", "kernels_pallas"},
    "budget": {"layout"},
    "cache": {"host", "device", "spec", "budget", "layout"},
    "engine": {"cache", "models", "spec", "host", "layout"},
    "serve": {"engine", "cache", "host"},
    "bench": {"engine", "cache", "host", "models"},
    "adapters": {"engine", "cache", "host"},
    "kernels_pallas": set(),
}

# Parts that must stay light say what they take from outside the project, beside the standard library.
OUTSIDE = {
    "config": set(),
    "errors": set(),
    "layout": set(),
    "host": {"numpy"},
    "kernels_pallas": {"jax", "jaxtyping", "numpy"},
}


def part_of(module: str) -> str | None:
    """The part a dotted module name belongs to; "" is the package's top, None is not ours."""
    top, _, rest = module.partition(".")
    if top == "kernels_pallas":
        return top
    if top == "mambacache_jax":
        return rest.partition(".")[0]
    return None


def modules() -> dict[str, Path]:
    found = {}
    for package in ("mambacache_jax", "kernels_pallas"):
        for path in sorted((ROOT / package).rglob("*.py")):
            names = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imported(module: str, path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also inside functions and under `TYPE_CHECKING`."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # `from package import x` may name a module x as well as a value of the package.
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def offences(module: str, path: Path, source: str) -> list[str]:
    part = part_of(module)
    if part in ("", "cli", "__main__"):  # the lazy top and the command line may import everything
        return []
    allowed = ARROWS.get(part)
    if allowed is None:
        return [f"{path.name}: the part {part!r} has no arrows in this test"]
    found = []
    for line, name in imported(module, path, ast.parse(source)):
        target = part_of(name)
        where = f"{module.replace('.', '/')} line {line}"
        if target is None:
            outside = name.partition(".")[0]
            if part in OUTSIDE and outside not in OUTSIDE[part] | set(sys.stdlib_module_names):
                found.append(f"{where}: {part} -> {outside}")
        elif target not in ARROWS:
            found.append(f"{where}: {part} imports {name}, which hides the part it needs")
        elif target != part and target not in allowed:
            shared = target in EVERYWHERE and part != "kernels_pallas" and part not in EVERYWHERE
            if not shared:
                found.append(f"{where}: {part} -> {target}")
    return found


def test_parts_import_only_along_the_arrows():
    found = [text for name, path in modules().items() for text in offences(name, path, path.read_text())]
    assert not found, "\n".join(["Imports that the design does not allow:", *found])


@pytest.mark.parametrize(
    ("module", "source", "arrow"),
    [
        ("mambacache_jax.host.tree", "import jax.numpy as jnp", "host -> jax"),
        ("mambacache_jax.host.tree", "def f():\n    from ..device import pools", "host -> device"),
        ("mambacache_jax.device.pools", "from mambacache_jax.host.tree import Node", "device -> host"),
        (
            "mambacache_jax.cache",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import models",
            "cache -> models",
        ),
        ("kernels_pallas.ssm_scan.api", "from mambacache_jax.config import Kind", "kernels_pallas -> config"),
        ("mambacache_jax.engine.step", "from mambacache_jax import CacheConfig", "hides the part"),
        ("mambacache_jax.engine.step", "import mambacache_jax", "hides the part"),
        ("mambacache_jax.config", "from .errors import OutOfSlots", "config -> errors"),
    ],
)
def test_a_forbidden_import_is_named(module, source, arrow):
    (found,) = offences(module, Path("x.py"), source)
    assert arrow in found


@pytest.mark.parametrize("module", ["mambacache_jax", "mambacache_jax.host", "mambacache_jax.config"])
def test_importing_what_decides_does_not_import_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules or 'jaxlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


def test_lazy_names_are_those_that_type_checkers_see():
    tree = ast.parse((ROOT / "mambacache_jax" / "__init__.py").read_text())
    (block,) = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert sorted(seen) == mambacache_jax.__all__
    assert seen == mambacache_jax._MODULES
    assert set(mambacache_jax.__all__) <= set(dir(mambacache_jax))


@pytest.mark.parametrize("name", mambacache_jax.__all__)
def test_every_exported_name_resolves(name):
    value = getattr(mambacache_jax, name)
    assert value.__name__ == name
    assert value.__module__.startswith(f"mambacache_jax.{mambacache_jax._MODULES[name]}")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = mambacache_jax.Nothing
