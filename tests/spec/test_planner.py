"""Plans count bytes as arrays have them, choose by them, and say why."""

import jax
import pytest

from mambacache_jax.config import AttentionSpec
from mambacache_jax.spec import make_pending
from mambacache_jax.spec.planner import (
    DEVICES,
    MODES,
    Device,
    input_bytes,
    mode_bytes,
    plan_spec,
    state_bytes,
)
from mambacache_jax.spec.shapes import KIMI_LINEAR_48B, MODELS, NEMOTRON_H_8B, QWEN3_NEXT_80B, Outline

GIB = 2**30


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pending_bytes_are_those_of_the_arrays(name, dtype):
    layers = MODELS[name][:2]
    pending = jax.eval_shape(lambda: make_pending(layers, 5, 4, dtype))
    arrays = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((pending.inputs, pending.conv)))
    planned = mode_bytes("replay_exact", layers, num_rows=4, num_nodes=8, depth=4, dtype=dtype)
    assert planned.pending == arrays == 5 * 4 * 2 * input_bytes(layers[0], dtype)


@pytest.mark.parametrize(
    ("layers", "slot_mib", "snapshots_gib"),
    [
        (NEMOTRON_H_8B, 96, (12, 24, 48, 192)),
        (QWEN3_NEXT_80B, 72, (9, 18, 36, 144)),
        (KIMI_LINEAR_48B, 40, (5, 10, 20, 80)),
    ],
)
def test_snapshots_of_real_models_cost_what_they_are_known_to(layers, slot_mib, snapshots_gib):
    assert sum(state_bytes(spec) for spec in layers) == slot_mib * 2**20
    for nodes, gib in zip((4, 8, 16, 64), snapshots_gib, strict=True):
        assert mode_bytes("snapshot", layers, num_rows=32, num_nodes=nodes, depth=4).node_states == gib * GIB


def test_key_heads_follow_from_the_conv():
    assert [layers[0].num_key_heads for layers in (NEMOTRON_H_8B, QWEN3_NEXT_80B, KIMI_LINEAR_48B)] == [
        8,
        16,
        32,
    ]


@pytest.mark.parametrize("name", MODELS)
def test_replay_holds_no_state_a_node_and_moves_the_states_once(name):
    for nodes in (4, 16, 64):
        plan = plan_spec(MODELS[name], num_rows=32, num_nodes=nodes, depth=4, device="h100")
        costs = plan.by_mode
        assert costs["replay_parallel"].node_states == 0
        # A buffer that layers share saves room and moves as much.
        assert 0.8 < costs["one_layer"].moved / costs["snapshot"].moved < 1.05
        assert costs["one_layer"].moved > nodes / 3 * costs["replay_exact"].moved
        assert costs["replay_exact"].moved == costs["replay_parallel"].moved
        inputs = costs["replay_exact"].moved - plan.decode_moved
        assert inputs == 32 * (nodes + 12) * sum(input_bytes(spec, "bfloat16") for spec in MODELS[name])


def test_the_form_of_few_nodes_gives_way_to_matmuls_where_work_shows():
    chosen = [
        plan_spec(NEMOTRON_H_8B, num_rows=8, num_nodes=n, depth=1, device="h100").mode
        for n in (2, 14, 15, 64)
    ]
    assert chosen == ["replay_exact", "replay_exact", "replay_parallel", "replay_parallel"]
    slow = Device(bandwidth=1e9, vector_flops=1e12)
    assert plan_spec(QWEN3_NEXT_80B, num_rows=1, num_nodes=64, depth=8, device=slow).mode == "replay_exact"


def test_a_plan_explains_itself():
    text = plan_spec(KIMI_LINEAR_48B, num_rows=32, num_nodes=16, depth=4, device="h100").explain()
    assert text.startswith("replay_parallel: 16 nodes > 8")
    assert "Snapshots would hold 20.00 GiB" in text
    assert all(mode in text for mode in MODES)
    assert "x decode" in text


def test_attention_layers_cost_a_k_and_v_a_node():
    attention = AttentionSpec(num_kv_heads=2, head_dim=256, v_head_dim=256)
    sizes = {"num_rows": 4, "num_nodes": 8, "depth": 4}
    with_it = mode_bytes("replay_exact", (*QWEN3_NEXT_80B, attention), **sizes)
    assert (
        with_it.node_values - mode_bytes("replay_exact", QWEN3_NEXT_80B, **sizes).node_values == 4 * 8 * 2048
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "abacus"}, "No figures for 'abacus'"),
        ({"specs": ()}, "no recurrent layers"),
        ({"depth": 9}, "depth <= num_nodes"),
        ({"num_rows": 0}, "num_rows >= 1"),
    ],
)
def test_impossible_plans_are_refused(changes, why):
    fields = {
        "specs": KIMI_LINEAR_48B,
        "num_rows": 1,
        "num_nodes": 8,
        "depth": 4,
        "device": "h100",
        **changes,
    }
    with pytest.raises(ValueError, match=why):
        plan_spec(fields.pop("specs"), **fields)


def test_table_9_7_with_its_own_numbers_and_the_right_products():
    """It says "several GB", "2.5 MB", 1/32 at the peak and 100 to 300 us; the first two lack a factor 32."""
    outline = Outline()
    assert outline.snapshots == 32 * 32 * 63 * 500_000 * 2 == 64_512_000_000
    assert outline.one_layer == outline.snapshots // 32 == 2_016_000_000
    # One request's worth is what the table gives; there are 32.
    assert outline.pending == 32 * 2_560_000
    assert round(outline.snapshots / outline.pending) == 788
    # At the peak the inputs of all nodes are alive beside the buffer.
    assert outline.node_inputs == 1_290_240_000
    peak = outline.one_layer + outline.node_inputs
    assert round(outline.snapshots / peak, 1) == 19.5
    # Each state is read and written once: 0.6 ms of the memory's time on an H100, not a launch a token.
    seconds = outline.replay_moved / DEVICES["h100"].bandwidth
    assert 0.6e-3 < seconds < 0.7e-3
