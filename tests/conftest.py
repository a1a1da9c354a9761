"""Strict JAX for every test: no implicit promotion, shapes of annotated functions checked when traced."""

import gc
import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A CPU process with libtpu installed prints errors unless these name a machine.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from jaxtyping import install_import_hook

install_import_hook(
    ["kernels_pallas", "mambacache_jax.device", "mambacache_jax.models", "mambacache_jax.spec"],
    "beartype.beartype",
)

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

AOT_COMPILERS = ("libtpu", "jax_cuda13_plugin")


def pytest_collection_modifyitems(config, items):
    """Leaves the `aot` tests out where their compilers are not installed; `make aot` installs them."""
    if all(importlib.util.find_spec(name) for name in AOT_COMPILERS):
        return
    left_out = [item for item in items if item.get_closest_marker("aot")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs():
    """Keeps a process far from the 65,530 memory mappings that Linux allows it.

    Each program that XLA compiles for a CPU maps its code. All tests together compiled so many in one process
    that the compiler crashed.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
