"""What a program becomes on an NVIDIA GPU, without one: registers, spills and accesses of its kernels.

XLA compiles for the target and writes each kernel's PTX to a folder; CUDA's `ptxas -v` then allocates
registers for the real chip. Memory latency, bank conflicts and clocks are not modelled, so figures compare
versions of a kernel; they are no speed.
"""

import pathlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from kernels_pallas.aot import target_device

_PTXAS_LINES = {
    "registers": r"Used (\d+) registers",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
    "stack_bytes": r"(\d+) bytes stack frame",
}


def compile_report_gpu(fn: Callable, args: Sequence[Any], donate: Sequence[int], target: str) -> dict:
    """Compiles `fn(*args)` for a GPU that is not here, and says what came out.

    Args:
      fn: traced with the target as its platform, so that ops choose their implementations for it.
      args: arrays or `jax.ShapeDtypeStruct`s, in trees.
      donate: which arguments are donated.
      target: "sm_80", "sm_90a" or "sm_100a".

    Returns:
      A dict of `argument_bytes`, `alias_bytes` (of outputs that are in a donated buffer), `temp_bytes`,
      `copies` (shapes that the program copies) and `kernels`. A kernel is a dict of its `name`; `threads` of
      a block; `registers`, `spill_store_bytes`, `spill_load_bytes` and `stack_bytes` of a thread;
      `shared_bytes` of a block; `global_access`, how many instructions "load" and "store" global memory by
      the bits of a thread, as in `{"load.128": 8}`; and how many `barriers` and `matrix_ops` there are.

    Raises:
      ValueError: an unknown target.
      RuntimeError: `ptxas` is not installed, or refuses a kernel.
    """
    ptxas = _find_ptxas()
    device = target_device(target)
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(args))
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=None, platform="cuda")
    with tempfile.TemporaryDirectory() as folder:
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
            lowered = jax.jit(fn, donate_argnums=tuple(donate)).lower(*shapes)
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_gpu_autotune_level": "0"})
        dump = pathlib.Path(folder)
        shared = _dynamic_shared(dump)
        kernels = [
            kernel | {"shared_bytes": kernel["shared_bytes"] + shared.get(kernel["name"], 0)}
            for path in sorted(dump.glob("*.ptx"))
            # XLA splits a module to compile it in parallel, and parts may be empty.
            if path.stat().st_size
            for kernel in _kernels(path, target, ptxas)
        ]
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    copies = re.findall(r"= (\S+?)(?:\{\S*)? copy\(", text)
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "copies": [shape for shape in copies if not re.search(r"[\[,]0[\],]", shape)],
        "kernels": kernels,
    }


def _find_ptxas():
    found = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    if found is None:
        raise RuntimeError("GPU reports need CUDA's ptxas on the PATH or in /usr/local/cuda/bin.")
    return found


def _dynamic_shared(dump):
    """Shared memory that a launch asks for, by kernel."""
    launch = re.compile(r"(\S+) grid: \[[\d, ]+\] threads: \[[\d, ]+\]\s+shared_memory: (\d+)")
    texts = [path.read_text() for path in dump.glob("*thunk_sequence.txt")]
    return {name: int(size) for text in texts for name, size in launch.findall(text)}


def _kernels(path, target, ptxas):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        command = [ptxas, "-v", f"-arch={target}", str(path), "-o", cubin.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses {path.name} for {target}: {done.stderr.strip()[:500]}")
    compiled = re.compile(r"Compiling entry function '(\S+)' for \S+(.*?)(?=Compiling entry|\Z)", re.DOTALL)
    log = dict(compiled.findall(done.stderr))
    for entry in path.read_text().split(".visible .entry ")[1:]:
        name = entry.partition("(")[0]
        figures = {key: _first_int(pattern, log[name]) for key, pattern in _PTXAS_LINES.items()}
        yield {
            "name": name,
            "threads": _first_int(r"\.(?:reqntid|maxntid) (\d+)", entry),
            **figures,
            "shared_bytes": _first_int(r"(\d+) bytes smem", log[name]),
            "global_access": dict(sorted(_global_access(entry).items())),
            "barriers": len(re.findall(r"\bbar(?:rier)?\.(?:sync|cta)", entry)),
            "matrix_ops": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma|tcgen05\.mma)", entry)),
        }


def _global_access(entry):
    found = Counter()
    for what, suffixes in re.findall(r"\b(ld|st)\.(?:[\w:]+\.)*?global((?:[.:][\w:]+)*)", entry):
        vector, element = re.search(r"\.v(\d)", suffixes), re.search(r"\.[bfsu](\d+)$", suffixes)
        bits = int(vector[1] if vector else 1) * int(element[1] if element else 0)
        found[f"{'load' if what == 'ld' else 'store'}.{bits}"] += 1
    return found


def _first_int(pattern, text):
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
