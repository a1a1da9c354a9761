"""What a stranger meets first holds: the README's commands exist, versions agree, no file is too large."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST_BYTES = 5_000_000


def files() -> list[Path]:
    """What git tracks or would, so that no environment or build output is looked at."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_make_command_of_the_readme_is_a_target():
    named = re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text())
    assert {"demo", "test"} <= set(named)
    assert set(named) <= targets()


@pytest.mark.parametrize(("page", "count"), [("README.md", 2), ("mambacache_jax/host/README.md", 1)])
def test_the_examples_of_a_page_run(page, count):
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(examples) == count
    for example in examples:
        exec(compile(example, page, "exec"), {})


def test_every_target_is_phony():
    """A file named like a target would make `make` skip it."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(phony.split()) == targets()


def test_ci_runs_targets_that_exist():
    called = re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert called[0] == "test"
    assert set(called) <= targets()


def test_no_file_is_larger_than_five_megabytes():
    assert {
        str(p.relative_to(ROOT)): p.stat().st_size for p in files() if p.stat().st_size > LARGEST_BYTES
    } == {}


def test_the_changelog_opens_with_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"]


def test_every_direct_dependency_is_pinned():
    def name(line: str) -> str:
        return re.match(r"[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {
        name(r) for r in [*project["dependencies"], *extras["dev"], *extras["notebooks"], *extras["aot"]]
    }
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert needed - {project["name"]} <= {name(pin) for pin in pins}
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^ ;]+( ; .+)?", pin) for pin in pins)
