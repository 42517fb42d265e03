"""config.json of published models with windows, chunks or sigmoid routers, with as many layers as fit on one H200. Every
layer has its published shape."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The text model. The published files nest it, with the prefix "language_model." before the names of its weights.
LLAMA_4_SCOUT: dict[str, Any] = _COMMON | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 24,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 202048,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "max_position_embeddings": 10485760,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "attention_chunk_size": 8192,
    "no_rope_layers": [],
    "use_qk_norm": True,
    "attn_temperature_tuning": 4,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
GPT_OSS_120B: dict[str, Any] = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "quantization_config": {"quant_method": "mxfp4"},
}
GLM_45: dict[str, Any] = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 14,
    "first_k_dense_replace": 3,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000.0,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
HYBRID: dict[str, dict[str, Any]] = {"scout": LLAMA_4_SCOUT, "gptoss120b": GPT_OSS_120B, "glm45": GLM_45}
HYBRID_TITLES = {
    "scout": "Llama 4 Scout (24 of 48 layers)",
    "gptoss120b": "gpt-oss-120b",
    "glm45": "GLM-4.5 (14 of 92 layers)",
}
