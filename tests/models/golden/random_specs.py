"""Random configurations of every family, so that nothing is fitted to the fixtures that are committed."""

import random

SMALL = {
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _pick(r, *choices):
    return r.choice(choices)


def _heads(r):
    kv = _pick(r, 1, 2, 3)
    return {
        "num_key_value_heads": kv,
        "num_attention_heads": kv * _pick(r, 1, 2, 3),
        "attention_bias": _pick(r, True, False),
    }


def _kinds(r, count):
    """At least one layer of each kind, in any order."""
    kinds = ["linear_attention", "full_attention"]
    kinds += [_pick(r, "linear_attention", "full_attention") for _ in range(count - 2)]
    r.shuffle(kinds)
    return kinds


def _mamba(r):
    """Sizes whose heads times their channels are twice the model's, as these configs demand."""
    heads, groups = _pick(r, (4, 1), (4, 2), (6, 3), (8, 4))
    head_dim = _pick(r, 4, 8, 12)
    return heads * head_dim // 2, {
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_head": head_dim,
        "mamba_d_state": _pick(r, 4, 8, 12),
        "mamba_d_conv": _pick(r, 2, 3, 4),
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        "mamba_conv_bias": _pick(r, True, False),
        "mamba_proj_bias": _pick(r, True, False),
    }


def _sized_for(size, heads):
    """Attention of these configs splits the model's channels over its heads, each an even share."""
    return size % (2 * heads["num_attention_heads"]) == 0


def granite(r):
    while True:
        size, mamba = _mamba(r)
        heads = _heads(r)
        if _sized_for(size, heads):
            break
    experts = _pick(r, 0, 4, 7)
    kinds = _kinds(r, _pick(r, 2, 3))
    return "GraniteMoeHybridConfig", mamba | heads | {
        "hidden_size": size,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "position_embedding_type": _pick(r, "rope", None),
        "intermediate_size": 20,
        "shared_intermediate_size": 28,
        "num_local_experts": experts,
        "num_experts_per_tok": min(experts, _pick(r, 1, 2, 3)),
        "embedding_multiplier": _pick(r, 1.0, 3.0),
        "logits_scaling": _pick(r, 1.0, 1.7),
        "residual_multiplier": _pick(r, 1.0, 0.5),
        "attention_multiplier": _pick(r, 0.2, 0.4),
        "tie_word_embeddings": _pick(r, True, False),
    }


def bamba(r):
    while True:
        size, mamba = _mamba(r)
        heads = _heads(r)
        if size % (4 * heads["num_attention_heads"]) == 0:  # half a head's channels are rotated
            break
    return "BambaConfig", mamba | heads | {
        "hidden_size": size,
        "num_hidden_layers": 3,
        "attn_layer_indices": _pick(r, [0], [1], [0, 2]),
        "intermediate_size": 28,
        "mlp_bias": _pick(r, True, False),
        "tie_word_embeddings": _pick(r, True, False),
    }


def falcon_h1(r):
    _, mamba = _mamba(r)

    def multiplier():
        return _pick(r, 1.0, 0.7, 1.3)

    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return "FalconH1Config", mamba | _heads(r) | {
        "hidden_size": _pick(r, 24, 40),
        "head_dim": _pick(r, 8, 12),
        "num_hidden_layers": 2,
        "intermediate_size": 28,
        "mamba_d_ssm": mamba["mamba_n_heads"] * mamba["mamba_d_head"],
        "mamba_rms_norm": _pick(r, True, False),
        "mamba_norm_before_gate": _pick(r, True, False),
        "projectors_bias": _pick(r, True, False),
        "mlp_bias": _pick(r, True, False),
        "mlp_multipliers": [multiplier(), multiplier()],
        "ssm_multipliers": [multiplier() for _ in range(5)],
        "tie_word_embeddings": _pick(r, True, False),
        **{f"{name}_multiplier": multiplier() for name in names},
    }


def nemotron_h(r):
    heads, groups = _pick(r, (4, 1), (4, 2), (6, 3))
    kinds = ["linear_attention", "full_attention", "mlp", "moe", _pick(r, "linear_attention", "moe")]
    r.shuffle(kinds)
    expert_groups = _pick(r, 1, 2, 4)
    return "NemotronHConfig", _heads(r) | {
        "attention_bias": False,
        "hidden_size": _pick(r, 24, 40),
        "head_dim": _pick(r, 8, 10),
        "layers_block_type": kinds,
        "intermediate_size": 28,
        "ssm_state_size": _pick(r, 4, 8),
        "mamba_num_heads": heads,
        "mamba_head_dim": _pick(r, 6, 8),
        "n_groups": groups,
        "conv_kernel": _pick(r, 2, 4),
        "use_conv_bias": _pick(r, True, False),
        "use_bias": _pick(r, True, False),
        "mlp_bias": _pick(r, True, False),
        "chunk_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": expert_groups,
        "topk_group": _pick(r, 1, expert_groups),
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": _pick(r, None, 16),
        "norm_topk_prob": _pick(r, True, False),
        "routed_scaling_factor": _pick(r, 1.0, 2.5),
        "time_step_min": 1e-30,
    }


def _qwen(r):
    keys = _pick(r, 1, 2, 3)
    kinds = _kinds(r, _pick(r, 2, 3))
    return _heads(r) | {
        "hidden_size": _pick(r, 24, 40),
        "head_dim": _pick(r, 16, 24),
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "intermediate_size": 28,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * _pick(r, 1, 2, 3),
        "linear_key_head_dim": _pick(r, 8, 12),
        "linear_value_head_dim": _pick(r, 8, 12),
        "linear_conv_kernel_dim": _pick(r, 2, 4),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _pick(r, 100.0, 1e6),
            "partial_rotary_factor": _pick(r, 0.25, 0.5),
        },
        "tie_word_embeddings": _pick(r, True, False),
    }


def _qwen_experts(r):
    return {
        "num_experts": _pick(r, 4, 7),
        "num_experts_per_tok": _pick(r, 1, 3),
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
    }


def qwen3_5(r):
    return "Qwen3_5TextConfig", _qwen(r)


def qwen3_5_moe(r):
    return "Qwen3_5MoeTextConfig", _qwen(r) | _qwen_experts(r)


def qwen3_next(r):
    return "Qwen3NextConfig", _qwen(r) | _qwen_experts(r) | {
        "norm_topk_prob": _pick(r, True, False),
        "decoder_sparse_step": _pick(r, 1, 2),
        "mlp_only_layers": _pick(r, [], [0]),
    }


def kimi_linear(r):
    heads = _pick(r, 2, 3)
    kinds = _kinds(r, 3)
    groups = _pick(r, 1, 2)
    return "KimiLinearConfig", {
        "hidden_size": _pick(r, 24, 40),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "mlp_layer_types": [_pick(r, "dense", "sparse") for _ in kinds],
        "intermediate_size": 28,
        "moe_intermediate_size": 20,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": _pick(r, 1, 2),
        "n_group": groups,
        "topk_group": _pick(r, 1, groups),
        "norm_topk_prob": _pick(r, True, False),
        "routed_scaling_factor": _pick(r, 1.0, 2.446),
        "kv_lora_rank": _pick(r, 12, 20),
        "qk_rope_head_dim": _pick(r, 4, 8),
        "qk_nope_head_dim": _pick(r, 8, 12),
        "v_head_dim": _pick(r, 8, 12),
        "linear_head_dim": _pick(r, 8, 12),
        "linear_num_heads": _pick(r, 1, 3),
        "linear_conv_kernel_dim": _pick(r, 2, 4),
    }


FAMILIES = (granite, bamba, falcon_h1, nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next, kimi_linear)


def specs(count, seed):
    """`count` specs of each family, as `specs.json` holds them."""
    found = {}
    for make in FAMILIES:
        for index in range(count):
            r = random.Random(f"{make.__name__} {seed} {index}")
            config_class, config = make(r)
            experts = any("expert" in key for key in config) and config.get("num_local_experts") != 0
            found[f"{make.__name__}_{seed}_{index}"] = {
                "seed": r.randrange(1000),
                "lengths": [70],
                "experts": experts,
                "config_class": config_class,
                "config": SMALL | config,
            }
    return found
