"""Compiled rounds hold what the plan says: states of nodes with snapshots, of one layer, or none."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from mambacache_jax.config import CacheConfig, EngineConfig, RecurrentSpec
from mambacache_jax.device import make_pools
from mambacache_jax.engine.sampler import sample
from mambacache_jax.models.tiny.network import TinyConfig, TinyLM
from mambacache_jax.models.tiny.weights import as_model
from mambacache_jax.models.verify import verify
from mambacache_jax.spec import DraftTree, ReplayPlan, choose, make_pending, walk
from mambacache_jax.spec.planner import mode_bytes

ROWS, NODES, DEPTH, LAYERS = 4, 16, 4, 3


@functools.cache
def measured(mode):
    """Specs, and the compiler's figures for a round; nothing is computed. States outweigh all else."""
    config = TinyConfig(
        layers=("gdn",) * LAYERS + ("attention",),
        size=16,
        mlp_size=16,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        delta_key_heads=1,
        delta_heads=8,
        delta_dim=64,
    )
    network = TinyLM(config, nnx.Rngs(0))
    graphdef, params = nnx.split(network)
    model = as_model(network, params, graphdef)
    cache = CacheConfig(num_kv_slots=64, num_ssm_slots=2 * ROWS)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
    pools = jax.eval_shape(
        lambda: make_pools(model.specs, cache, EngineConfig(max_running=ROWS, max_context=64), "float32")
    )
    recurrent = [spec for spec in model.specs if isinstance(spec, RecurrentSpec)]
    pending = jax.eval_shape(lambda: make_pending(recurrent, ROWS + 1, DEPTH, "float32"))
    plan = ReplayPlan(*[int32((ROWS,))] * 4)
    tree = DraftTree(int32((ROWS, NODES)), int32((ROWS, NODES)), int32((ROWS,)))

    def judge(tree, logits, kv_len):
        greedy = np.zeros((ROWS, 5), np.int32)
        return walk(tree, choose(sample, logits, jax.numpy.asarray(greedy), tree, kv_len, DEPTH), DEPTH)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def program(params, pools, pending, plan, tree):
        return verify(
            model,
            params,
            pools,
            pending,
            plan,
            tree,
            judge,
            page_size=1,
            depth=DEPTH,
            mode=mode,
            track_interval=16,
        )

    compiled = program.lower(params, pools, pending, plan, tree).compile()
    donated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((pools, pending)))
    return model.specs, compiled.memory_analysis(), donated


def planned(mode, specs):
    return mode_bytes(mode, specs, num_rows=ROWS, num_nodes=NODES, depth=DEPTH, dtype="float32")


@pytest.mark.parametrize("mode", ["snapshot", "replay_parallel"])
def test_pools_and_pending_inputs_are_updated_in_place(mode):
    _, memory, donated = measured(mode)
    assert memory.alias_size_in_bytes == donated


def test_replay_holds_no_states_of_nodes():
    specs, replay, _ = measured("replay_parallel")
    # Beside what the plan counts, the states that are folded and looked ahead from, and the layers' own.
    assert replay.temp_size_in_bytes < planned("snapshot", specs).node_states / 4


def test_snapshots_cost_what_the_plan_says_more_than_replay():
    specs, snapshot, _ = measured("snapshot")
    _, replay, _ = measured("replay_parallel")
    got = snapshot.temp_size_in_bytes - replay.temp_size_in_bytes
    want = planned("snapshot", specs).node_states
    assert abs(got - want) < 0.05 * want
