"""No step's compiled program copies a pool: they are aliased, and what it needs beside them is small."""

import re

import chex
import jax
import numpy as np
import pytest

from mambacache_jax.config import CacheConfig, EngineConfig
from mambacache_jax.device import make_pools
from mambacache_jax.engine.step import StepProgram
from mambacache_jax.layout import PlanShape

NUM_KV_SLOTS, NUM_SSM_SLOTS = 2**18, 1020

SHAPES = {
    "decode": (False, PlanShape(16, 0, 64, 0, 0)),
    "mixed": (False, PlanShape(4, 2, 64, 4, 40)),
    "deterministic": (True, PlanShape(0, 6, 64, 4, 40)),
}


@pytest.fixture(scope="module")
def pools(model):
    """Shapes of large pools, so that a copy of any leaf shows."""
    cache = CacheConfig(num_kv_slots=NUM_KV_SLOTS, num_ssm_slots=NUM_SSM_SLOTS)
    return jax.eval_shape(lambda: make_pools(model.specs, cache, EngineConfig(), "float32"))


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_works_in_the_pools_own_buffers(model, pools, name):
    deterministic, shape = SHAPES[name]
    program = StepProgram(model, page_size=1, deterministic=deterministic, return_logits=False)
    compiled = program.lower(pools, shape=shape).compile()
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools)]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(sizes)
    # Measured: 3 to 6 MB of activations; the smallest KV or state leaf of these pools takes 8 MB.
    assert memory.temp_size_in_bytes < 8e6
    slots = f"{NUM_KV_SLOTS + 1}|{NUM_SSM_SLOTS + 1}"
    copies = re.findall(rf"= f32\[(?:{slots})[\d,]*\]\S* copy\(", compiled.as_text())
    assert not copies


def test_a_shape_is_traced_once(make_engine):
    chex.clear_trace_counter()
    engine = make_engine()
    program = engine._program
    before = program.traces
    engine.generate([np.arange(10)])
    first = program.traces - before
    engine.generate([np.arange(20, 60), np.arange(100)])
    assert program.traces - before == first <= 2
