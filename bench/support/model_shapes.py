"""config.json of the published models whose shapes are benchmarked with random weights, and quantized variants of them."""

from __future__ import annotations

from typing import Any

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
PLAIN: dict[str, dict[str, Any]] = {"llama8b": LLAMA_8B, "qwen30a3b": QWEN_30B_A3B}


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
SHAPES: dict[str, dict[str, Any]] = PLAIN | {
    f"{shape}-{name}": {**config, "quantization_config": quantization}
    for shape, config in PLAIN.items()
    for name, quantization in QUANTIZED.items()
}
# Only the experts are quantized, as in Kimi K2.
SHAPES["qwen30a3b-experts-int4"] = {
    **QWEN_30B_A3B, "quantization_config": {**QUANTIZED["int4"], "ignore": ["lm_head", "re:.*self_attn.*"]}
}  # fmt: skip
TITLES = {"llama8b": "Llama-3.1-8B", "qwen30a3b": "Qwen3-30B-A3B"}


def title(shape: str) -> str:
    """The model's name: "Llama-3.1-8B, fp8" for llama8b-fp8."""
    name, _, variant = shape.partition("-")
    return TITLES[name] + (f", {variant}" if variant else "")
