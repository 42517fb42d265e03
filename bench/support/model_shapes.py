"""config.json of the published models whose shapes are benchmarked with random weights, and quantized variants of them."""

from __future__ import annotations

from typing import Any

from bench.support.hybrid_shapes import HYBRID, HYBRID_TITLES

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _dense(base: dict[str, Any], hidden: int, mlp: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
    """A dense model of the family of `base`, with 8 KV heads."""
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**base, **sizes, "num_key_value_heads": 8, **fields}


_LLAMA_32 = {"rope_scaling": {**LLAMA_8B["rope_scaling"], "factor": 32.0}, "tie_word_embeddings": True}
_MOE_FIELDS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
_QWEN_3: dict[str, Any] = {
    **{name: value for name, value in QWEN_30B_A3B.items() if name not in (*_MOE_FIELDS, "decoder_sparse_step")},
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
}
del _QWEN_3["mlp_only_layers"]
# Two large MoE models with fewer layers, so that they fit on one GPU; every layer has its published shape.
_QWEN_235B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
}
_QWEN_480B: dict[str, Any] = {
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "moe_intermediate_size": 2560,
    "num_hidden_layers": 8,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_experts": 160,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000.0,
}
# Two models with latent attention, with as many layers as fit on one GPU in their published formats.
_YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": _YARN,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {**_YARN, "factor": 64.0, "beta_fast": 1.0},
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama8b": LLAMA_8B,
    "qwen30a3b": QWEN_30B_A3B,
    "llama1b": _dense(LLAMA_8B, 2048, 8192, 16, 32, head_dim=64, **_LLAMA_32),
    "llama3b": _dense(LLAMA_8B, 3072, 8192, 28, 24, **_LLAMA_32),
    "llama70b": _dense(LLAMA_8B, 8192, 28672, 80, 64),
    "qwen4b": _dense(_QWEN_3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen14b": _dense(_QWEN_3, 5120, 17408, 40, 40),
    "qwen32b": _dense(_QWEN_3, 5120, 25600, 64, 64),
    "qwen235b": {**QWEN_30B_A3B, **_QWEN_235B},
    "qwen480b": {**QWEN_30B_A3B, **_QWEN_480B},
}


def _compressed(format_name: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """A quantization_config in the compressed-tensors format."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_PER_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, _PER_TOKEN),
    "blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int4": _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
}


def _quantized(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The quantized variant. Routers stay in bf16, as in published checkpoints."""
    quantization = dict(QUANTIZED[kind])
    if "num_experts" in config:
        gates = [f"model.layers.{layer}.mlp.gate" for layer in range(config["num_hidden_layers"])]
        names = "modules_to_not_convert" if kind == "blocks" else "ignore"
        quantization[names] = ["lm_head", *gates]
    return {**config, "quantization_config": quantization}


SHAPES: dict[str, dict[str, Any]] = PLAIN | {
    f"{shape}-{kind}": _quantized(config, kind) for shape, config in PLAIN.items() for kind in QUANTIZED
}
SHAPES |= HYBRID
# Only the experts are quantized, as in Kimi K2.
SHAPES["qwen30a3b-experts-int4"] = {
    **QWEN_30B_A3B, "quantization_config": {**QUANTIZED["int4"], "ignore": ["lm_head", "re:.*self_attn.*"]}
}  # fmt: skip
SHAPES["deepseekv3-blocks"] = {**DEEPSEEK_V3, "quantization_config": {**QUANTIZED["blocks"], "fmt": "e4m3"}}
_KIMI_IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
SHAPES["kimik25-int4"] = {**KIMI_K2, "quantization_config": {**QUANTIZED["int4"], "ignore": _KIMI_IGNORED}}
TITLES = {
    "deepseekv3": "DeepSeek-V3 (12 of 61 layers)",
    "kimik25": "Kimi K2.5 text (12 of 61 layers)",
    "llama8b": "Llama-3.1-8B",
    "qwen30a3b": "Qwen3-30B-A3B",
    "llama1b": "Llama-3.2-1B",
    "llama3b": "Llama-3.2-3B",
    "llama70b": "Llama-3.3-70B",
    "qwen4b": "Qwen3-4B",
    "qwen14b": "Qwen3-14B",
    "qwen32b": "Qwen3-32B",
    "qwen235b": "Qwen3-235B-A22B (16 of 94 layers)",
    "qwen480b": "Qwen3-Coder-480B-A35B (8 of 62 layers)",
    **HYBRID_TITLES,
}
# The shapes on which Stoker is compared with its competitors. They were chosen before the first measurement: from 1B to
# 70B, dense and MoE, bf16 and fp8, and none of the two that the kernels were tuned on first (llama8b, qwen30a3b).
COMPARED = ("llama1b", "qwen4b", "qwen32b", "llama70b-fp8", "qwen235b", "qwen480b-fp8")


def title(shape: str) -> str:
    """The model's name: "Llama-3.1-8B, fp8" for llama8b-fp8."""
    name, _, variant = shape.partition("-")
    return TITLES[name] + (f", {variant}" if variant else "")
