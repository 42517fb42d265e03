"""An invalid config.json is refused by the name of its field, instead of failing later with a division by zero."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from stoker.base.errors import ModelFilesError
from stoker.models.family import MODELS, family_of

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
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


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
        ({"rope_parameters": LLAMA3 | {"original_max_position_embeddings": "8k"}}, "original_max"),
        ({"rope_theta": "10k"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"num_attention_heads": 5, "head_dim": 16}, "num_key_value_heads"),
        ({"num_attention_heads": 2, "num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"architectures": 5}, "architectures"),
        ({"num_attention_heads": 65, "num_key_value_heads": 65}, "num_attention_heads"),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], named: str) -> None:
    family_of(RIGHT, "config.json")
    with pytest.raises(ModelFilesError, match=named):
        family_of(RIGHT | wrong, "config.json")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        # As model pages describe how to extend the context, in a file written by a newer transformers.
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "disagree"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ],
)
def test_an_unsupported_rope_is_refused_instead_of_ignored(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFilesError, match=named):
        family_of(RIGHT | asked, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": None, "attention_bias": None, "head_dim": None, "tie_word_embeddings": None},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": None, "rope_theta": 1e6},
        {
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0},
            "rope_scaling": {"type": "linear", "factor": 2},
        },
        {"partial_rotary_factor": 1},
    ],
)
def test_null_fields_and_consistent_duplicates_are_accepted(changes: dict[str, Any]) -> None:
    family_of(RIGHT | changes, "config.json")


def fp8_rotated_at(location: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": location}]}}},
    }


def test_a_rotation_at_run_time_is_refused() -> None:
    with pytest.raises(ModelFilesError, match="transform_config"):
        family_of(RIGHT | {"quantization_config": fp8_rotated_at("input")}, "config.json")
    family_of(RIGHT | {"quantization_config": fp8_rotated_at("weight_input")}, "config.json")


def test_a_group_that_is_longer_than_a_row_is_named() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    asked = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    with pytest.raises(ModelFilesError, match="groups of 128 inputs"):
        family_of(RIGHT | {"quantization_config": asked}, "config.json")


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
def test_a_sliding_window_is_refused_instead_of_ignored(hf: dict[str, Any]) -> None:
    with pytest.raises(ModelFilesError, match="sliding-window"):
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
def test_a_window_that_no_layer_uses_is_accepted(changes: dict[str, Any]) -> None:
    family_of(QWEN | changes, "config.json")


EXAMPLES = [
    pytest.param({**RIGHT, "head_dim": 16, **changes, "architectures": [architecture]}, id=name)
    for architecture in MODELS
    for name, changes in MODELS.get(architecture).examples.items()
]
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_nextn_predict_layers", "num_mtp_modules")
LISTS = ("layer_types", "mlp_only_layers", "no_rope_layers", "moe_layers", "attn_type_list")
HOSTILE = [
    *((name, value) for name in ("num_hidden_layers", "hidden_size", "head_dim") for value in (10**9, 10**400)),
    *((name, value) for name in COUNTS for value in (10**9, [], "x")),
    *((name, value) for name in LISTS for value in (5, "x", {"a": 1}, [[]] * 3, [None] * 3)),
    *((name, value) for name in ("rope_scaling", "rope_parameters") for value in (5, "x", [1])),
    ("partial_rotary_factor", 10**400),
]


@pytest.mark.parametrize("hf", EXAMPLES)
def test_every_family_refuses_what_it_cannot_read_at_once(hf: dict[str, Any]) -> None:
    """A family may ignore a field that it does not use. It must neither fail in another way nor try to build the model."""
    for name, value in HOSTILE:
        config = {**hf, name: value}
        with suppress(ModelFilesError):
            family_of({**config, "text_config": config}, "config.json")


FP8_GROUP = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": FP8_GROUP}}


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": 5}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "ignored_layers": [5]}, "ignored_layers"),
        ({"quant_method": "gguf", "group_size": 32}, "modules"),
        ({**COMPRESSED, "config_groups": None}, "config_groups"),
        ({**COMPRESSED, "config_groups": {"g": {**FP8_GROUP, "targets": [5]}}}, "targets"),
        ({**COMPRESSED, "config_groups": {"g": {**FP8_GROUP, "targets": ["re:((("]}}}, "regular expression"),
        ({**COMPRESSED, "config_groups": {"g": {**FP8_GROUP, "weights": "x"}}}, "weights"),
        ({**COMPRESSED, "config_groups": {"g": {**FP8_GROUP, "weights": {"group_size": "x"}}}}, "group_size"),
        ({**COMPRESSED, "config_groups": {"g": {**FP8_GROUP, "input_activations": "x"}}}, "input_activations"),
        ({**COMPRESSED, "sparsity_config": "x"}, "sparsity_config"),
        ({**COMPRESSED, "transform_config": [1]}, "transform_config"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"r": {"apply": 5}}}}, "apply"),
    ],
)
def test_a_wrong_field_of_the_quantisation_is_named(quantisation: dict[str, Any], named: str) -> None:
    family_of(RIGHT | {"quantization_config": COMPRESSED}, "config.json")
    with pytest.raises(ModelFilesError, match=named):
        family_of(RIGHT | {"quantization_config": quantisation}, "config.json")
