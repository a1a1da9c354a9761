"""What a program becomes on a TPU, without one: the schedules of its Pallas kernels.

libtpu writes each kernel's final VLIW bundles to a folder; a bundle takes about a cycle. Cycles are bundles
times the trips of the loops around them, as if every branch were taken. Waits for transfers, bank conflicts
and the latency of memory are not in them, so figures compare versions of a kernel; they are no speed.
"""

import dataclasses
import multiprocessing
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from kernels_pallas.aot import target_device

# Of a core: HBM bytes a second, and cycles a second derived from its peak of matrix products.
HBM_BANDWIDTH = {"v5e": 0.82e12, "v5p": 1.23e12, "v6e": 1.64e12, "tpu7x": 3.70e12}
CLOCK = {"v5e": 1.50e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.20e9}

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*>*\s*\{")
_EXIT_TEST = re.compile(r"%(\w+) = scmp\.\w+\.s32\.totalorder [^;]*?, (\w+) /\* loop exit test")
_BACK = re.compile(r"sbr\.rel \(!?%(\w+)\) target = \$(region\d+)")
_REGION = re.compile(r"Start (region) (\d+)")
_TRANSFER = re.compile(
    r"dma\.(hbm_to_vmem|vmem_to_hbm|hbm_to_smem|hbm_to_hbm)\b[^;]*?size_in_granules=\*/(\d+),"
)
_GRANULE_BYTES = 32


def compile_report_tpu(
    fn: Callable, args: Sequence[Any], donate: Sequence[int], target: str, run_time_trips: int = 1
) -> dict:
    """Compiles `fn(*args)` for a TPU that is not here, in a process of its own, and says what came out.

    Args:
      fn: picklable; traced with the target as its platform.
      args: arrays or `jax.ShapeDtypeStruct`s, in trees.
      donate: which arguments are donated.
      target: "v5e", "v5p", "v6e" or "tpu7x".
      run_time_trips: trips assumed for loops whose bounds are not known before the kernel runs.

    Returns:
      As `compile_report`. A kernel is a dict of its `name`; `bundles` in its schedule; `spill_stores` and
      `spill_loads`, how many of them move a register that had to be freed; `units`, how often each is used;
      estimated `cycles`; `hbm_bytes` moved if every transfer that is asked for conditionally takes place; and
      `compute_us` and `hbm_us`, the time for either at the core's clock and peak bandwidth.

    Raises:
      ValueError: an unknown target.
      RuntimeError: the program does not compile, or libtpu wrote no schedule.
    """
    # libtpu reads its flags once, when it is loaded.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=spawn) as process:
        job = process.submit(_compile, fn, tuple(args), tuple(donate), target, run_time_trips, folder)
        return job.result()


def _compile(fn, args, donate, target, run_time_trips, folder):
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_mosaic_dump_to={folder}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    device = target_device(target)
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    # Lowering asks the default device what it is, which is not the target.
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        lowered = jax.jit(fn, donate_argnums=donate).lower(*shapes)
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    names = sorted(set(re.findall(r'kernel_name = "(\w+)"', lowered.as_text())))
    schedules = [path for name in names for path in _files(folder, name, "final_bundles")]
    if names and not schedules:
        raise RuntimeError(f"libtpu wrote no schedule of {', '.join(names)} for {target}.")
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "copies": _copies(compiled),
        "kernels": [_kernel(path, target, run_time_trips) for path in schedules],
    }


def _files(folder, kernel, dump):
    return sorted(pathlib.Path(folder).glob(f"*-{kernel}.*-[0-9]*-{dump}.txt"))


def _copies(compiled):
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        # jax 0.10.2 cannot print some programs for v6e.
        return None
    copies = re.findall(r"= (\S+?)(?:\{\S*)? copy\(", text)
    return [shape for shape in copies if not re.search(r"[\[,]0[\],]", shape)]


def _kernel(path, target, run_time_trips):
    start = path.name.rpartition("-final_bundles")[0].rpartition("-")[0]
    use = next(path.parent.glob(f"{start}-*-final_hlo-static-per-bundle-utilization.txt"))
    units = _units(use.read_text().splitlines())
    root = _loops(path.read_text().splitlines())
    cycles, hbm_bytes = root.cycles(run_time_trips), root.bytes(run_time_trips)
    return {
        "name": start.partition("-")[2].partition(".")[0],
        "bundles": root.all_bundles(),
        "spill_stores": units.pop("VSTORE:SPILL", 0),
        "spill_loads": units.pop("VLOAD:FILL", 0),
        "units": units,
        "cycles": cycles,
        "compute_us": 1e6 * cycles / CLOCK[target],
        "hbm_bytes": hbm_bytes,
        "hbm_us": 1e6 * hbm_bytes / HBM_BANDWIDTH[target],
    }


def _units(lines):
    """How many bundles' slots of each unit are used; a table with names, capacities and a line a bundle."""
    names = [name.strip() for name in lines[1].split(",")]
    rows = [line.split() for line in lines[4:]]
    rows = [[int(n) for n in row] for row in rows if len(row) == len(names)]
    return {name: sum(row[n] for row in rows) for n, name in enumerate(names)}


@dataclasses.dataclass
class _Loop:
    """A loop of a schedule, or all of it: its own bundles and bytes, and the loops in it."""

    trips: int | None
    regions: set[str]
    bundles: int = 0
    moved: int = 0
    inner: list["_Loop"] = dataclasses.field(default_factory=list)

    def all_bundles(self):
        return self.bundles + sum(loop.all_bundles() for loop in self.inner)

    def cycles(self, run_time_trips):
        inner = sum(loop.cycles(run_time_trips) for loop in self.inner)
        return (run_time_trips if self.trips is None else self.trips) * (self.bundles + inner)

    def bytes(self, run_time_trips):
        inner = sum(loop.bytes(run_time_trips) for loop in self.inner)
        return (run_time_trips if self.trips is None else self.trips) * (self.moved + inner)


def _loops(lines):
    """The nest of loops of a schedule.

    A loop begins at a bundle labelled LB, which starts its region too, and ends with the branch back there.
    Trips are the constant in the test that the branch looks at.
    """
    root = _Loop(1, set())
    open_loops, tests = [root], {}
    for line in lines:
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        if bundle.group(1) == "LB":
            regions = {"".join(region) for region in _REGION.findall(line)}
            loop = _Loop(None, regions)
            open_loops[-1].inner.append(loop)
            open_loops.append(loop)
        open_loops[-1].bundles += 1
        open_loops[-1].moved += sum(int(size) for _, size in _TRANSFER.findall(line)) * _GRANULE_BYTES
        for register, bound in _EXIT_TEST.findall(line):
            tests[register] = int(bound) if bound.isdigit() else None
        for register, region in _BACK.findall(line):
            if any(region in loop.regions for loop in open_loops):
                while region not in open_loops[-1].regions:
                    open_loops.pop()
                open_loops.pop().trips = tests.get(register)
    return root
