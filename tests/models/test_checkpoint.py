"""A checkpoint loads however it was written, and what does not fit is named in one error."""

import json
import shutil
import tracemalloc
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from mambacache_jax import Engine, EngineConfig
from mambacache_jax.models import PlainContext, abstract, load, weights
from mambacache_jax.models.families import FAMILIES

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def copy(tmp_path):
    """`copy(name, config={}, tensors=None)`: a fixture with changed keys and tensors; None removes a key."""

    def make(name, config=None, tensors=None):
        folder = tmp_path / name
        shutil.copytree(GOLDEN / name, folder)
        path = folder / "config.json"
        values = {**json.loads(path.read_text()), **(config or {})}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
        if tensors is not None:
            found = safetensors.numpy.load_file(folder / "model.safetensors")
            safetensors.numpy.save_file(tensors(found), folder / "model.safetensors")
        return folder

    return make


def renamed(*pairs):
    def change(tensors):
        for old, new in pairs:
            assert any(old in name for name in tensors), old
            tensors = {name.replace(old, new): value for name, value in tensors.items()}
        return tensors

    return change


def same_params(folder, name):
    chex.assert_trees_all_equal(load(folder).params, load(GOLDEN / name).params)


def test_sharded_files_are_read_by_their_index(copy):
    folder = copy("granite")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::3]}
        safetensors.numpy.save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    same_params(folder, "granite")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"not there: model-00002-of-00003\.safetensors"):
        load(folder)


def test_names_of_a_model_for_images_and_text(copy):
    """Qwen3.5 on hubs: the text's keys and tensors are a part, beside vision and draft tensors."""

    def tensors(found):
        text = renamed(("model.", "model.language_model."))(found)
        extra = ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight")
        return text | {name: np.zeros((2, 2), np.float32) for name in extra}

    text = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text())
    outer = {
        "model_type": "qwen3_5",
        "text_config": text | {"eos_token_id": [7, 8]},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": True,
        "image_token_id": 5,
    }
    folder = copy("qwen3_5", dict.fromkeys(text) | outer, tensors)
    same_params(folder, "qwen3_5")
    assert load(folder).eos_token_ids == (7, 8)


def test_keys_and_names_of_kimi_linear_on_hubs(copy):
    """Layers by number from 1 in `linear_attn_config`, and the dense layer called mlp."""
    new = {
        "layer_types": None,
        "mlp_layer_types": None,
        "linear_head_dim": None,
        "linear_num_heads": None,
        "linear_conv_kernel_dim": None,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 16,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
    }
    change = renamed(("layers.0.block_sparse_moe.", "layers.0.mlp."))
    same_params(copy("kimi_linear", new, change), "kimi_linear")


def test_keys_and_names_of_nemotron_h_on_hubs_and_in_transformers(copy):
    """One letter a layer; and the prefix that transformers has at run time."""
    new = {"layers_block_type": None, "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4}
    same_params(copy("nemotron_h", new, renamed(("backbone.", "model."))), "nemotron_h")


def test_experts_may_be_one_tensor(copy):
    def fused(tensors):
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            each = [
                {name: tensors.pop(f"{prefix}.{e}.{name}_proj.weight") for name in ("gate", "up", "down")}
                for e in range(5)
            ]
            gate_up = [np.concatenate([expert["gate"], expert["up"]]) for expert in each]
            tensors[f"{prefix}.gate_up_proj"] = np.stack(gate_up)
            tensors[f"{prefix}.down_proj"] = np.stack([expert["down"] for expert in each])
        return tensors

    same_params(copy("qwen3_5_moe", None, fused), "qwen3_5_moe")


def test_bfloat16_keeps_decays_and_routers_in_float32_and_logits_near():
    """Half the bytes; the logits are those of the same weights up to bfloat16 activations."""
    model = load(GOLDEN / "qwen3_5_moe", dtype="bfloat16")
    pairs = zip(weights.names(model.params), jax.tree.leaves(model.params), strict=True)
    kept = {name.split(".", 2)[2] for name, leaf in pairs if leaf.dtype == jnp.float32}
    assert kept == {"mixer.a_log", "mixer.dt_bias", "mlp.router.weight"}
    assert model.dtype == "bfloat16"
    arrays = np.load(GOLDEN / "qwen3_5_moe" / "golden.npz")
    tokens = jnp.asarray(arrays["ids_0"])

    @jax.jit
    def forward(params, tokens):
        return model.logits(params, model.hidden(params, tokens, PlainContext(model.specs, 1, len(tokens))))

    logits = forward(model.params, tokens)
    assert logits.dtype == jnp.float32
    # A router may choose another expert of nearly equal score, so single rows may be further off.
    error = np.asarray(logits) - arrays["logits_0"]
    assert np.sqrt((error**2).mean()) < 0.1 * arrays["logits_0"].std()


def test_an_abstract_model_is_the_loaded_one_without_weights():
    for name in ("qwen3_5_moe", "tiny"):
        whole, outline = (make(name if name == "tiny" else GOLDEN / name) for make in (load, abstract))
        chex.assert_trees_all_equal_shapes_and_dtypes(outline.params, whole.params)
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(outline.params))
        for field in (
            "specs",
            "vocab_size",
            "max_context",
            "eos_token_ids",
            "dtype",
            "widest",
            "weight_bytes",
        ):
            assert getattr(outline, field) == getattr(whole, field)


def test_a_layer_is_as_wide_as_its_widest_map_or_the_experts_of_a_token(copy):
    assert abstract(GOLDEN / "granite").widest == 296  # of the Mamba-2 layers' first map
    folder = copy("qwen3_next", {"num_experts_per_tok": 2})
    assert abstract(folder).widest == 320  # queries, gates, keys and values of attention
    folder = copy("qwen3_5_moe", {"num_experts_per_tok": 5, "moe_intermediate_size": 100})
    assert abstract(folder).widest == 5 * (48 + 200)


@pytest.mark.parametrize(
    ("name", "key"), [("qwen3_5", "mamba_ssm_dtype"), ("nemotron_h", "mamba_ssm_cache_dtype")]
)
def test_states_are_stored_as_the_config_asks(copy, name, key):
    """Float32 where it does not say; deterministic mode keeps float32."""
    assert abstract(GOLDEN / "granite").state_dtype == "float32"
    model = load(copy(name, {key: "bfloat16"}))
    assert model.state_dtype == "bfloat16"
    engine = Engine(model, config=EngineConfig(max_running=1, max_context=64))
    assert engine.cache.config.state_dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in engine.cache.pools.ssm.state} == {"bfloat16"}
    engine = Engine(model, config=EngineConfig(max_running=1, max_context=64, deterministic=True))
    assert engine.cache.config.state_dtype == "float32"


def test_reading_holds_one_parameter_beside_those_on_the_device():
    """Peak host memory while loading, less what lives on as parameters."""
    name = "kimi_linear"
    load(GOLDEN / name)
    tracemalloc.start()
    model = load(GOLDEN / name)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert peak - current < 2 * largest + 400_000  # the module's own objects are some hundred kilobytes
    assert total > 4 * largest


def test_one_error_lists_every_tensor_that_does_not_fit(copy):
    def tensors(found):
        del found["model.norm.weight"]
        found["model.layers.9.mlp.weight"] = np.zeros((2, 3), np.float32)
        found["model.layers.0.input_layernorm.weight"] = np.zeros((63,), np.float32)
        found["model.embed_tokens.weight"] = np.zeros((128, 64), np.int32)
        return found

    with pytest.raises(ValueError, match="does not fit its config") as error:
        load(copy("granite", None, tensors))
    for part in (
        "missing model.norm.weight",
        "unknown model.layers.9.mlp.weight (2, 3)",
        "model.layers.0.input_layernorm.weight (63,) cannot make layers.0.mixer_norm.weight (64,)",
        "model.embed_tokens.weight is I32",
    ):
        assert part in str(error.value)


def test_an_unknown_architecture_is_named_and_the_supported_listed(copy):
    new = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match=r"'llama'.*LlamaForCausalLM") as error:
        load(copy("granite", new))
    assert all(name in str(error.value) for name in FAMILIES)


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("granite", {"attention_sinks": 4}, "unsupported 'attention_sinks'. Supported are .*'layer_types'"),
        ("granite", {"quantization_config": {"bits": 4}}, "unsupported 'quantization_config'"),
        ("granite", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; supported is 'silu'"),
        ("granite", {"layer_types": ["conv"] * 4}, r"'layer_types' holds \['conv'\]; supported are"),
        ("granite", {"num_hidden_layers": 5}, "names 4 layers, num_hidden_layers is 5"),
        ("granite", {"hidden_size": None}, "key 'hidden_size' is missing"),
        ("granite", {"hidden_size": "64"}, "'hidden_size' must be int, got '64'"),
        ("granite", {"time_step_limit": [0.001, 0.1]}, "'time_step_limit' is"),
        ("granite", {"rope_scaling": {"rope_type": "yarn"}}, "'rope_scaling'.*'rope_type' is 'yarn'"),
        ("nemotron_h", {"sliding_window": 64}, "'sliding_window' is 64; supported is null"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, r"holds \['X'\]"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "must hold 5 numbers"),
        ("kimi_linear", {"q_lora_rank": 8}, "'q_lora_rank' is 8; supported is null"),
    ],
)
def test_an_unsupported_key_or_value_is_named(copy, name, new, message):
    with pytest.raises(ValueError, match=message):
        load(copy(name, new))


def test_a_folder_without_weights_and_an_unknown_dtype_are_refused(copy):
    folder = copy("granite")
    with pytest.raises(ValueError, match="dtype must be"):
        load(folder, dtype="float16")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object"):
        load(folder)


def test_a_progress_bar_is_shown_only_when_asked_for(capsys):
    load(GOLDEN / "granite")
    assert capsys.readouterr().out == ""
    load(GOLDEN / "granite", progress=True)
    assert "Loading weights" in capsys.readouterr().out
