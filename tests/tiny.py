"""Tiny random models in Hugging Face's own form, made by transformers: the reference that ours are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Few experts, so that each of them is chosen by one of a few tokens.
MOE = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied-wide-heads": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "num_hidden_layers": 2}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**MOE, "num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
}


def make_tiny(folder: Path, name: str, dtype: torch.dtype = torch.float32, **more_changes: Any) -> Any:
    """Writes the model into `folder` and returns transformers' own."""
    family, changes = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes, **more_changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # transformers starts norms at one and biases at zero: then a swapped or forgotten one would not show.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model
