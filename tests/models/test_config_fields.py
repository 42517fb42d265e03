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
