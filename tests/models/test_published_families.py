"""The published configurations of Llama 4, gpt-oss, GLM-4.5 and MiniMax-M2 are read, their weights have the published
names and sizes, and a field that changes the computation is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.support.hybrid_shapes import GLM_45, GPT_OSS_120B, LLAMA_4_SCOUT
from stoker.base.errors import ModelFilesError
from stoker.kv.blocks.layout import KvGroup
from stoker.models.family import ModelFamily, family_of

SCOUT = {**LLAMA_4_SCOUT, "num_hidden_layers": 48}
MAVERICK = {**SCOUT, "num_local_experts": 128, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576,
            "rope_scaling": None, "use_qk_norm": False}  # fmt: skip
NESTED = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {}}
GLM = {**GLM_45, "num_hidden_layers": 92, "num_nextn_predict_layers": 1}
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
    "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
    "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True,
    "use_qk_norm": True, "qk_norm_type": "per_layer", "rope_theta": 5000000.0, "vocab_size": 200064,
    "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "attn_type_list": [1] * 62, "shared_intermediate_size": 0, "num_mtp_modules": 3,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                            "weight_block_size": [128, 128],
                            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
}  # fmt: skip
TOP = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
Q_TO_O = tuple(f"self_attn.{x}_proj.weight" for x in "qkvo")
GATED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def llama4_names(config: dict[str, Any]) -> Iterator[str]:
    yield from (f"language_model.{name}" for name in TOP)
    for i in range(config["num_hidden_layers"]):
        layer = f"language_model.model.layers.{i}."
        yield from (layer + name for name in (*NORMS, *Q_TO_O))
        if (i + 1) % config["interleave_moe_layer_step"]:
            yield from (f"{layer}feed_forward.{name}" for name in GATED)
        else:
            yield from (f"{layer}feed_forward.shared_expert.{name}" for name in GATED)
            yield from (
                f"{layer}feed_forward.{name}" for name in ("router.weight", "experts.gate_up_proj", "experts.down_proj")
            )


def gpt_oss_names() -> Iterator[str]:
    yield from TOP
    for i in range(36):
        layer = f"model.layers.{i}."
        yield from (layer + name for name in (*NORMS, *Q_TO_O, "self_attn.sinks"))
        yield from (f"{layer}self_attn.{x}_proj.bias" for x in "qkvo")
        yield from (f"{layer}mlp.router.{name}" for name in ("weight", "bias"))
        for part in ("gate_up_proj", "down_proj"):
            yield from (f"{layer}mlp.experts.{part}_{name}" for name in ("blocks", "scales", "bias"))


def glm_names() -> Iterator[str]:
    yield from TOP
    for i in range(92):
        layer = f"model.layers.{i}."
        yield from (layer + name for name in (*NORMS, *Q_TO_O, "self_attn.q_norm.weight", "self_attn.k_norm.weight"))
        yield from (f"{layer}self_attn.{x}_proj.bias" for x in "qkv")
        if i < 3:
            yield from (f"{layer}mlp.{name}" for name in GATED)
            continue
        yield from (f"{layer}mlp.gate.{name}" for name in ("weight", "e_score_correction_bias"))
        yield from (f"{layer}mlp.shared_experts.{name}" for name in GATED)
        yield from (f"{layer}mlp.experts.{expert}.{name}" for expert in range(160) for name in GATED)


def minimax_names() -> Iterator[str]:
    yield from TOP
    for i in range(62):
        layer = f"model.layers.{i}."
        yield from (layer + name for name in (*NORMS, "self_attn.q_norm.weight", "self_attn.k_norm.weight"))
        matmuls = [*(f"self_attn.{x}_proj" for x in "qkvo")]
        matmuls += [f"block_sparse_moe.experts.{expert}.w{x}" for expert in range(256) for x in (1, 2, 3)]
        yield from (f"{layer}{name}.{part}" for name in matmuls for part in ("weight", "weight_scale_inv"))
        yield from (f"{layer}block_sparse_moe.{name}" for name in ("gate.weight", "e_score_correction_bias"))


def family(config: dict[str, Any]) -> ModelFamily:
    return family_of(config, "config.json")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({**NESTED, "text_config": SCOUT}, llama4_names(SCOUT)),
        ({**NESTED, "text_config": MAVERICK}, llama4_names(MAVERICK)),
        (GPT_OSS_120B, gpt_oss_names()),
        (GLM, glm_names()),
        (MINIMAX, minimax_names()),
    ],
    ids=["scout", "maverick", "gpt-oss-120b", "glm-4.5", "minimax-m2"],
)
def test_each_published_tensor_has_one_rule(config: dict[str, Any], names: Iterator[str]) -> None:
    sources = [rule.source for rule in family(config).rules]
    assert len(set(sources)) == len(sources)
    assert set(sources) == set(names)


def num_weights(config: dict[str, Any]) -> float:
    """Return the number of weights in billions, without scales."""
    with torch.device("meta"):
        model = family(config).build(16)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    codes = sum(2 * size for name, size in sizes.items() if name.endswith("blocks"))
    plain = sum(size for name, size in sizes.items() if not name.endswith(("blocks", "scales", "weight_scale_inv")))
    return (codes + plain) / 1e9


@pytest.mark.parametrize(
    ("config", "billions"), [(SCOUT, 107.8), (MAVERICK, 400.7), (GPT_OSS_120B, 116.8), (GLM, 352.8), (MINIMAX, 228.7)]
)
def test_models_have_their_published_sizes(config: dict[str, Any], billions: float) -> None:
    assert num_weights(config) == pytest.approx(billions, abs=0.06)


def test_kv_groups_of_published_models() -> None:
    assert family(SCOUT).kv_groups == (KvGroup(12, 8, 128), KvGroup(36, 8, 128, "chunk", 8192))
    assert family(GPT_OSS_120B).kv_groups == (KvGroup(18, 8, 64), KvGroup(18, 8, 64, "window", 128))
    assert family(GLM).kv_groups == (KvGroup(92, 8, 128),)


def test_tensors_of_other_parts_are_ignored_by_name() -> None:
    assert {"vision_model.", "multi_modal_projector."} <= family({**NESTED, "text_config": SCOUT}).ignored
    assert "model.layers.92." in family(GLM).ignored
    assert {f"model.layers.{i}." for i in (62, 63, 64)} <= family(MINIMAX).ignored


@pytest.mark.parametrize(
    ("config", "wrong", "named"),
    [
        (SCOUT, {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        (SCOUT, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (SCOUT, {"no_rope_layers": [2] * 48}, "no_rope_layers"),
        (SCOUT, {"moe_layers": [48]}, "moe_layers"),
        (SCOUT, {"layer_types": ["full_attention"]}, "layer_types"),
        (SCOUT, {"layer_types": ["linear_attention"] * 48}, "linear_attention"),
        (SCOUT, {"attention_chunk_size": 0}, "attention_chunk_size"),
        (SCOUT, {"floor_scale": -1}, "floor_scale"),
        (SCOUT, {"hidden_act": "gelu"}, "hidden_act"),
        (SCOUT, {"quantization_config": {"quant_method": "fbgemm_fp8"}}, "fbgemm_fp8"),
        (NESTED, {}, "text_config"),
        (GPT_OSS_120B, {"layer_types": ["sliding_attention", "chunked_attention"] * 18}, "chunked_attention"),
        (GPT_OSS_120B, {"sliding_window": None}, "sliding_window"),
        (GPT_OSS_120B, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (GPT_OSS_120B, {"hidden_size": 2900}, "hidden_size"),
        (GPT_OSS_120B, {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        (GLM, {"n_group": 7}, "n_group"),
        (GLM, {"partial_rotary_factor": 0.51}, "partial_rotary_factor"),
        (GLM, {"n_routed_experts": None}, "n_routed_experts"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX, {"attn_type_list": [0] * 62}, "attn_type_list"),
        (MINIMAX, {"shared_intermediate_size": 1024}, "shared_intermediate_size"),
        (MINIMAX, {"rotary_dim": 130}, "rotary_dim"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(config: dict[str, Any], wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFilesError, match=named):
        family({**config, **wrong})
