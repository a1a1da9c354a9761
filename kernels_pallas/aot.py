"""Devices that are not here: topologies to compile for ahead of time.

A TPU target needs the package `libtpu`; a GPU target needs `jax-cuda13-plugin` and `jax-cuda13-pjrt` of
JAX's own version. Neither needs the device or its driver.
"""

import functools
import os
from typing import Any

from jax.experimental import topologies

TPU_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

# Compute capability, accelerated features, cores, shared memory a core and at most a block, L2,
# HBM bytes and bytes a second.
_GPUS = {
    "sm_80": (
        (8, 0),
        False,
        108,
        167936,
        166912,
        41943040,
        85899345920,
        2039000000000,
        "NVIDIA A100-SXM4-80GB",
    ),
    "sm_90a": ((9, 0), True, 132, 233472, 232448, 52428800, 151397597184, 4800000000000, "NVIDIA H200"),
    "sm_100a": ((10, 0), True, 148, 233472, 232448, 132644864, 191000000000, 8000000000000, "NVIDIA B200"),
}

TARGETS = (*TPU_TOPOLOGIES, *_GPUS)


@functools.cache
def target_device(target: str) -> Any:
    """A `jax.Device` of the target to put in shardings of arguments; programs compile for it and do not run.

    Raises:
      ValueError: the target is unknown.
      RuntimeError, ModuleNotFoundError: the target's packages are not installed (from JAX).
    """
    if target in TPU_TOPOLOGIES:
        # libtpu asks the machine for these; they are the answers of a machine without a TPU.
        for name, value in {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }.items():
            os.environ.setdefault(name, value)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TPU_TOPOLOGIES[target])
    elif target in _GPUS:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="gpu", topology="1x1x1", target_config=_gpu_config(target)
        )
    else:
        raise ValueError(f"Unknown target {target!r}; there are {', '.join(TARGETS)}.")
    return topology.devices[0]


def _gpu_config(target: str) -> str:
    """The target's description as XLA's text proto."""
    (major, minor), accelerated, cores, shared, shared_block, l2, memory, bandwidth, name = _GPUS[target]
    feature = "feature_extension: ACCELERATED_FEATURES" if accelerated else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_block}
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {64 if major == 8 else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: 1.9
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
