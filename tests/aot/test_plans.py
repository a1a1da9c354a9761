"""Compiled ahead of time for a TPU and a GPU, a step takes the memory that a plan counts, within 5 %.

What this does not cover: models of real size (this one has four layers of real width), several devices,
and what a runtime keeps for itself.
"""

import json
from pathlib import Path

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from kernels_pallas.aot import target_device
from mambacache_jax import EngineConfig, plan_cache
from mambacache_jax.budget import estimate_step_bytes
from mambacache_jax.device import make_pools
from mambacache_jax.engine.step import StepProgram
from mambacache_jax.host import make_buckets
from mambacache_jax.models import abstract

pytestmark = pytest.mark.aot

GRANITE = Path(__file__).parents[1] / "models" / "golden" / "granite" / "config.json"
WIDE = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "shared_intermediate_size": 4096,
    "vocab_size": 49152,
}


@pytest.mark.parametrize("target", ["v6e", "sm_90a"])
def test_a_step_takes_the_memory_that_a_plan_counts(tmp_path, target):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(GRANITE.read_text()) | WIDE))
    model = abstract(tmp_path, dtype="bfloat16")
    engine = EngineConfig(max_context=4096)
    plan = plan_cache(
        model.specs,
        8 * 2**30,
        dtype=model.dtype,
        engine=engine,
        weight_bytes=model.weight_bytes,
        step_bytes=estimate_step_bytes(
            model.specs, engine, dtype=model.dtype, vocab_size=model.vocab_size, widest=model.widest
        ),
    )
    pools = jax.eval_shape(lambda: make_pools(model.specs, plan.cache, engine, model.dtype))
    program = StepProgram(model, plan.cache.page_size, deterministic=False, return_logits=False)
    lowered = program.lower(
        pools,
        shape=make_buckets(engine, plan.cache.page_size).shapes()[-1],
        sharding=SingleDeviceSharding(target_device(target)),
    )
    memory = lowered.compile().memory_analysis()
    output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes + output
    assert taken == pytest.approx(plan.total_bytes, rel=0.05)
