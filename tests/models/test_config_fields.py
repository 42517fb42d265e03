"""A config.json that cannot be right is refused by the name of its field, not met later as a division by zero."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.base.errors import ModelFilesError
from stoker.models.contract import family_of

RIGHT = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"head_dim": "16"}, "head_dim"),
        ({"head_dim": -16}, "head_dim"),
        ({"rope_scaling": ["linear"]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": "8k"}}, "original_max"),
        ({"rope_theta": "10k"}, "rope_theta"),
        ({"architectures": 5}, "architectures"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], named: str) -> None:
    family_of(RIGHT, "config.json")
    with pytest.raises(ModelFilesError, match=named):
        family_of(RIGHT | wrong, "config.json")


QWEN = RIGHT | {"architectures": ["Qwen3ForCausalLM"]}
MOE = RIGHT | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    "hf",
    [
        QWEN | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        QWEN | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        QWEN | {"layer_types": ["full_attention", "sliding_attention"]},
        MOE | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    ],
)
def test_a_sliding_window_is_refused_not_left_out(hf: dict[str, Any]) -> None:
    with pytest.raises(ModelFilesError, match="sliding window"):
        family_of(hf, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"layer_types": ["full_attention"] * 2},
    ],
)
def test_a_window_that_no_layer_has_is_no_reason_to_refuse(changes: dict[str, Any]) -> None:
    family_of(QWEN | changes, "config.json")
