"""Compiled ahead of time for a TPU and a GPU, no step copies a pool.

What this does not cover: nothing runs, so numerics and speed on the device are not shown. TPU tiles are
128 lanes wide, so the network here has real models' widths; with narrower layers XLA pads and re-lays
pools there.
"""

import re

import jax
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from kernels_pallas.aot import target_device
from mambacache_jax.config import CacheConfig, EngineConfig
from mambacache_jax.device import make_pools
from mambacache_jax.engine.step import StepProgram
from mambacache_jax.layout import PlanShape
from mambacache_jax.models.tiny import TinyConfig, TinyLM, as_model

pytestmark = pytest.mark.aot

SHAPES = {"decode": PlanShape(16, 0, 64, 0, 0), "mixed": PlanShape(4, 2, 64, 4, 40)}


@pytest.fixture(scope="module")
def wide_model():
    """One layer of each kind, with heads of 128."""
    config = TinyConfig(
        layers=("mamba2", "gdn", "attention", "kda"),
        head_dim=128,
        mamba_head_dim=128,
        mamba_state_dim=128,
        delta_dim=128,
    )
    network = TinyLM(config, nnx.Rngs(0))
    graphdef, params = nnx.split(network)
    return as_model(network, params, graphdef)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ["v5e", "sm_90a"])
def test_a_step_works_in_the_pools_own_buffers(wide_model, target, shape):
    cache = CacheConfig(num_kv_slots=2**16, num_ssm_slots=255)
    pools = jax.eval_shape(lambda: make_pools(wide_model.specs, cache, EngineConfig(), "float32"))
    program = StepProgram(wide_model, page_size=1, deterministic=False, return_logits=False)
    sharding = SingleDeviceSharding(target_device(target))
    compiled = program.lower(pools, shape=SHAPES[shape], sharding=sharding).compile()
    memory = compiled.memory_analysis()
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
    assert memory.alias_size_in_bytes >= pool_bytes
    # A copied leaf would show: the smallest of K, V and states takes 67 MB.
    assert memory.temp_size_in_bytes < 60e6
    copies = re.findall(r"= \w+\[(?:65537|256)[\d,]*\]\S* copy\(", compiled.as_text())
    assert not copies
