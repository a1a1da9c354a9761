"""A plan counts the bytes that the pools then have, fills the memory to a page, and says what is missing."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

from mambacache_jax import CacheConfig, Engine, EngineConfig, budget, plan_cache
from mambacache_jax.config import AttentionSpec, RecurrentSpec
from mambacache_jax.device import make_pools
from mambacache_jax.engine.step import StepProgram
from mambacache_jax.host import make_buckets
from mambacache_jax.models import abstract, load

GOLDEN = Path(__file__).parent / "models" / "golden"
MODELS = ["tiny", *sorted(str(path.parent) for path in GOLDEN.glob("*/config.json"))]

# The layers of published models that keep something, as their configs give them.
QWEN3_NEXT = (RecurrentSpec("gdn", 32, 128, 128, 8192, 4),) * 36 + (AttentionSpec(2, 256, 256),) * 12
NEMOTRON_H_8B = (RecurrentSpec("mamba2", 128, 128, 64, 10240, 4),) * 24 + (AttentionSpec(8, 128, 128),) * 4
KIMI_LINEAR = (RecurrentSpec("kda", 32, 128, 128, 12288, 4),) * 20 + (AttentionSpec(1, 576, 512, True),) * 7

SPECS = (RecurrentSpec("mamba2", 2, 4, 8, 32, 4), AttentionSpec(2, 16, 8), AttentionSpec(1, 24, 16, True))
ENGINE = EngineConfig(max_running=4, max_context=512)


def size_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def made(specs, cache, engine, dtype):
    """What `device` would make, as shapes."""
    return jax.eval_shape(lambda: make_pools(specs, cache, engine, dtype))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 48])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: Path(model).name)
def test_bytes_are_those_of_the_pools_that_the_device_makes(model, page_size, state_dtype):
    model = abstract(model, dtype="bfloat16")
    plan = plan_cache(
        model.specs,
        64 * 2**20,
        dtype=model.dtype,
        engine=ENGINE,
        page_size=page_size,
        state_dtype=state_dtype,
    )
    pools = made(model.specs, plan.cache, ENGINE, model.dtype)
    assert plan.pool_bytes == size_of((pools.kv, pools.ssm))
    assert plan.table_bytes == size_of(pools.table)
    assert plan.total_bytes == size_of(pools)


@pytest.mark.parametrize("model", ["tiny", str(GOLDEN / "kimi_linear")], ids=["tiny", "kimi_linear"])
def test_an_engine_with_a_plans_sizes_has_its_bytes(model):
    model = load(model)
    config = EngineConfig(max_running=2, max_context=64)
    plan = plan_cache(
        model.specs,
        model.weight_bytes + 2**20,
        dtype=model.dtype,
        engine=config,
        weight_bytes=model.weight_bytes,
    )
    engine = Engine(model, plan.cache, plan.engine)
    assert engine.cache.pool_bytes == plan.pool_bytes
    assert size_of(model.params) == plan.weight_bytes
    assert engine.stats().ssm_total == plan.cache.num_ssm_slots


def test_a_compiled_step_takes_the_memory_that_a_plan_counts(tmp_path):
    """Within 5 %: what lies there before a step is exact, what it needs on top is an estimate."""
    wide = {
        "hidden_size": 512,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "shared_intermediate_size": 2048,
        "vocab_size": 32768,
    }
    config = json.loads((GOLDEN / "granite" / "config.json").read_text()) | wide
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = abstract(tmp_path, dtype="float32")
    engine = EngineConfig(max_running=4, max_context=512, token_budget=128)
    plan = plan_cache(
        model.specs,
        2**29,
        dtype="float32",
        engine=engine,
        weight_bytes=model.weight_bytes,
        step_bytes=budget.estimate_step_bytes(
            model.specs, engine, dtype="float32", vocab_size=model.vocab_size, widest=model.widest
        ),
    )
    program = StepProgram(model, plan.cache.page_size, deterministic=False, return_logits=False)
    largest = make_buckets(engine, plan.cache.page_size).shapes()[-1]
    lowered = program.lower(made(model.specs, plan.cache, engine, "float32"), shape=largest)
    memory = lowered.compile().memory_analysis()
    step_plan = 4 * largest.size
    assert memory.argument_size_in_bytes - step_plan == plan.total_bytes - plan.step_bytes
    output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes + output
    assert taken == pytest.approx(plan.total_bytes, rel=0.05)
    # Score tiles and the chunk form's matrices are not in the estimate, and buffers that are not alive at the
    # same time share memory: a factor of two either way.
    assert 0.5 < memory.temp_size_in_bytes / plan.step_bytes < 2


def test_a_steps_estimate_is_its_logits_channels_and_states():
    """By hand, for 4 running requests, 512 + 4 tokens, 4 rows that extend and 2 exports for each."""
    sizes = {"dtype": "bfloat16", "vocab_size": 1000, "widest": 100}
    states = 2 * (4 + 4 * 4) * 64 * 4
    assert budget.estimate_step_bytes(SPECS, ENGINE, **sizes) == 3 * 8 * 4000 + 5 * 516 * 200 + states
    block_by_block = dataclasses.replace(ENGINE, deterministic=True)
    logits = (512 + 4 * 64 + 3 * 8) * 4000
    assert budget.estimate_step_bytes(SPECS, block_by_block, **sizes) == logits + 5 * 64 * 200 + states


@pytest.mark.parametrize(
    ("specs", "tokens"), [(QWEN3_NEXT, 3144), (NEMOTRON_H_8B, 6234), (KIMI_LINEAR, 5384)]
)
def test_a_state_of_a_published_model_weighs_as_many_tokens_as_by_hand(specs, tokens):
    state = budget.ssm_slot_bytes(specs, "bfloat16", "float32")
    assert round(state / budget.kv_slot_bytes(specs, "bfloat16")) == tokens


def test_latent_attention_pays_for_its_keys_alone():
    assert budget.slot_bytes(AttentionSpec(1, 576, 512, True), "bfloat16", "float32") == 1152
    assert budget.slot_bytes(AttentionSpec(1, 576, 512), "bfloat16", "float32") == 1152 + 1024


@pytest.mark.parametrize("memory", [2**20, 2**22 + 12345, 10**9])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_less_than_a_page_is_left_over(memory, share):
    plan = plan_cache(
        SPECS, memory, dtype="bfloat16", engine=ENGINE, page_size=16, weight_bytes=1000, step_bytes=500,
        checkpoint_share=share,
    )  # fmt: skip
    assert plan.total_bytes == plan.pool_bytes + plan.table_bytes + 1500
    assert 0 <= memory - plan.total_bytes < 16 * plan.kv_slot_bytes
    assert plan.cache.num_ssm_slots - plan.num_checkpoints == 3 * ENGINE.max_running
    assert plan.num_contexts >= 1
    assert plan.num_checkpoints >= 1


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_checkpoints_get_their_share_of_what_requests_leave(share):
    plan = plan_cache(SPECS, 10**8, dtype="bfloat16", engine=ENGINE, checkpoint_share=share)
    checkpoints = plan.num_checkpoints * plan.ssm_slot_bytes
    kv = plan.cache.num_kv_slots * plan.kv_slot_bytes
    assert checkpoints / (checkpoints + kv) == pytest.approx(share, abs=1e-4)  # a slot in 10^8 bytes


def least(**options):
    """The fewest bytes for which there is a plan, by bisection."""
    low, high = 1, 2**30
    while low < high:
        middle = (low + high) // 2
        try:
            plan_cache(SPECS, middle, dtype="float32", engine=ENGINE, **options)
            high = middle
        except ValueError:
            low = middle + 1
    return low


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_the_least_memory_holds_one_context_and_one_checkpoint(share):
    plan = plan_cache(
        SPECS, least(page_size=48, checkpoint_share=share), dtype="float32", engine=ENGINE, page_size=48,
        checkpoint_share=share,
    )  # fmt: skip
    assert plan.num_checkpoints == 1
    assert plan.cache.num_kv_slots == 528  # 512 tokens in pages of 48
    assert plan.total_bytes == plan.memory_bytes


def test_what_is_missing_is_named_to_the_byte():
    enough = least(weight_bytes=50_000)
    with pytest.raises(ValueError, match=r"is 100 B too little.*weights 48\.83 KiB.*4 running requests"):
        plan_cache(SPECS, enough - 100, dtype="float32", engine=ENGINE, weight_bytes=50_000)
    with pytest.raises(ValueError, match=r"The weights alone do not fit\."):
        plan_cache(SPECS, 50_000, dtype="float32", engine=ENGINE, weight_bytes=50_000)


def test_intervals_are_whole_pages():
    plan = plan_cache(SPECS, 10**7, dtype="float32", engine=ENGINE, page_size=48)
    assert (plan.cache.track_interval, plan.cache.checkpoint_interval) == (288, 2064)
    plan = plan_cache(SPECS, 10**7, dtype="float32", engine=ENGINE, page_size=16)
    assert plan.cache.track_interval == CacheConfig.track_interval
    assert plan.cache.checkpoint_interval == CacheConfig.checkpoint_interval


def test_slots_stay_within_int32():
    small = (RecurrentSpec("mamba2", 1, 1, 1, 1, 2), AttentionSpec(1, 1, 1))
    plan = plan_cache(small, 2**40, dtype="bfloat16", engine=ENGINE, checkpoint_share=0.001)
    assert plan.cache.num_kv_slots + plan.cache.page_size == 2**31 - 1
    assert "int32" in plan.explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_share": 0.0}, "checkpoint_share must be"),
        ({"checkpoint_share": 1.0}, "checkpoint_share must be"),
        ({"page_size": 0}, "page_size must be"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"state_dtype": "float16"}, "state_dtype must be"),
        ({"specs": SPECS[:1]}, "one kind is missing"),
        ({"specs": SPECS[1:]}, "one kind is missing"),
    ],
)
def test_a_wrong_argument_is_named(options, message):
    options = {"specs": SPECS, "dtype": "float32"} | options
    with pytest.raises(ValueError, match=message):
        plan_cache(options.pop("specs"), 10**8, engine=ENGINE, **options)


def test_the_explanation_holds_every_part_of_the_memory():
    plan = plan_cache(SPECS, 10**8, dtype="bfloat16", engine=ENGINE, weight_bytes=3 * 2**20, step_bytes=2**20)
    text = plan.explain()
    for part in (
        "95.37 MiB",
        "weights",
        "3.00 MiB",
        "1.00 MiB",
        "1 attention of 96 B, 1 attention of 48 B",
        "1 mamba2 of 448 B",
    ):
        assert part in text
    assert f"{plan.cache.num_kv_slots:,} tokens" in text
    assert f"{plan.num_checkpoints:,} SSM slots" in text
    assert json.loads(json.dumps(plan.figures()))["cache"] == dataclasses.asdict(plan.cache)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5 gib", 3 * 2**29),
        ("4096", 4096),
        ("7B", 7),
        (" 2TB ", 2 * 10**12),
    ],
)
def test_sizes_are_read(text, size):
    assert budget.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 G", "80GiBs", "-1GB", "1e9", "0", "0.1B", "8,0GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"such as 80GiB or 500MB; got {text!r}")):
        budget.parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**39, "1.50 TiB")]
)
def test_sizes_are_shown(size, text):
    assert budget.show_bytes(size) == text
