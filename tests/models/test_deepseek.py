"""The DeepSeek family: published configurations and tensor names, quantised weights in their formats, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from tiny import make_tiny, nest
from tiny_quantised import int4, make_moe, worst_difference

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.errors import ModelFilesError
from stoker.engine.llm import LLM
from stoker.layers.quant import Fp8, Int4
from stoker.models.deepseek import DeepseekV3
from stoker.models.family import family_of

# Values of published config.json files.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "vocab_size": 129280,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "hidden_act": "silu", "attention_bias": False, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
KIMI_INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
KIMI_TEXT: dict[str, Any] = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "first_k_dense_replace": 1, "num_attention_heads": 64,
    "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "vocab_size": 163840, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "factor": 64.0, "beta_fast": 1.0}, "num_nextn_predict_layers": 0,
    "quantization_config": KIMI_INT4,
}  # fmt: skip
KIMI_K25 = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": KIMI_TEXT}
SETTINGS = EngineSettings(device="cpu", dtype="float32", num_threads=1, kv=KvSettings(8, 64))


def layer_names(
    hf: dict[str, Any], number: int, attention: list[str], expert: list[str], plain: list[str]
) -> Iterator[str]:
    """The tensors of a layer. The three lists are the suffixes of attention's matmuls, of those of an expert, and of the
    dense MLP's and the shared expert's."""
    layer = f"model.layers.{number}."
    yield from (f"{layer}{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm"))
    yield from (f"{layer}self_attn.{norm}.weight" for norm in ("q_a_layernorm", "kv_a_layernorm"))
    for module in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        yield from (f"{layer}self_attn.{module}.{suffix}" for suffix in attention)
    projections = ("gate_proj", "up_proj", "down_proj")
    if number < hf["first_k_dense_replace"]:
        yield from (f"{layer}mlp.{module}.{suffix}" for module in projections for suffix in plain)
        return
    yield from (f"{layer}mlp.gate.weight", f"{layer}mlp.gate.e_score_correction_bias")
    yield from (f"{layer}mlp.shared_experts.{module}.{suffix}" for module in projections for suffix in plain)
    for one in range(hf["n_routed_experts"]):
        yield from (f"{layer}mlp.experts.{one}.{module}.{suffix}" for module in projections for suffix in expert)


def published_names(hf: dict[str, Any], *suffixes: list[str]) -> list[str]:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for number in range(hf["num_hidden_layers"]):
        names += layer_names(hf, number, *suffixes)
    for number in range(hf["num_hidden_layers"], hf["num_hidden_layers"] + hf["num_nextn_predict_layers"]):
        names += layer_names(hf, number, *suffixes)
        extra = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head")
        names += [f"model.layers.{number}.{module}.weight" for module in extra]
    return names


def assert_each_once(family: Any, names: list[str]) -> None:
    sources = Counter(rule.source for rule in family.rules)
    prefixes = tuple(name for name in family.ignored if name.endswith("."))
    ignored = {name for name in names if name in family.ignored or name.startswith(prefixes)}
    assert max(sources.values()) == 1
    assert set(sources) == set(names) - ignored
    assert not ignored & set(sources)


def test_the_rules_of_deepseek_v3_cover_the_published_names() -> None:
    fp8 = ["weight", "weight_scale_inv"]
    family = family_of(DEEPSEEK_V3, "config.json")
    assert_each_once(family, published_names(DEEPSEEK_V3, fp8, fp8, fp8))
    assert isinstance(family, DeepseekV3)
    stored = family._config.stored
    assert all(isinstance(one, Fp8) for one in stored.values())
    assert "head" not in stored
    assert len(family.rules) > 89_000


def test_the_rules_of_kimi_k25_cover_the_published_names() -> None:
    family = family_of(KIMI_K25, "config.json")
    names = published_names(KIMI_TEXT, ["weight"], ["weight_packed", "weight_scale", "weight_shape"], ["weight"])
    vision = ["vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"]
    assert_each_once(family, [f"language_model.{name}" for name in names] + vision)
    assert isinstance(family, DeepseekV3)
    kinds = {name.rpartition(".")[2]: stored for name, stored in family._config.stored.items()}
    assert kinds == {"gate_up": Int4(32), "down": Int4(32)}
    assert not any("shared" in name or "layers.0." in name for name in family._config.stored)


def test_the_cache_of_published_models() -> None:
    for hf in (DEEPSEEK_V3, KIMI_K25):
        [group] = family_of(hf, "config.json").kv_groups
        assert (group.num_layers, group.num_heads, group.width, group.kind) == (61, 1, 576, "latent")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"index_topk": 2048}, "index_topk"),
        ({"linear_attn_config": {"num_heads": 4}}, "linear_attn_config"),
        ({"hc_mult": 4}, "hc_mult"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"n_group": 7}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"n_group": 64, "topk_group": 1}, "n_group"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"topk_group": 1, "num_experts_per_tok": 40}, "num_experts_per_tok"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"q_lora_rank": None, "attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {**KIMI_INT4, "ignore": 5}}, "ignore"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFilesError, match=named):
        family_of(DEEPSEEK_V3 | changes, "config.json")
    with pytest.raises(ModelFilesError, match=named):
        family_of(KIMI_K25 | {"text_config": DEEPSEEK_V3 | changes}, "config.json")


def test_a_nested_config_that_is_missing_is_named() -> None:
    with pytest.raises(ModelFilesError, match="text_config"):
        family_of({"architectures": ["KimiK25ForConditionalGeneration"]}, "config.json")


def test_packed_experts_are_those_of_compressed_tensors() -> None:
    """The files of these tests have the layout that the library writes."""
    torch.manual_seed(0)
    weight = torch.randn(24, 64)
    words, scale, values = int4(weight, 32)
    args = QuantizationArgs(num_bits=4, type="int", group_size=32, strategy="group", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    stored = PackedQuantizationCompressor.compress({"weight": values, "weight_scale": scale.float()}, scheme)
    assert torch.equal(stored["weight_packed"], words)
    assert stored["weight_shape"].tolist() == [24, 64]
    found = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.allclose(found.float(), values, atol=1e-6)


def is_expert(module: str) -> bool:
    return ".experts." in module


@pytest.mark.parametrize(
    ("scheme", "nested"), [("fp8 blocks", False), ("compressed channel", False), ("int4 groups of 32", True)]
)
def test_quantised_weights_give_the_logits_of_the_dequantised_model(scheme: str, nested: bool, tmp_path: Path) -> None:
    """Kimi K2.5 has 4-bit experts in nested files, DeepSeek-V3 8-bit blocks everywhere."""
    changes = {"ignore": KIMI_INT4["ignore"]} if nested else {}
    chosen = is_expert if nested else (lambda name: True)
    reference = make_moe(tmp_path, scheme, chosen, "DeepseekV3ForCausalLM", **changes)
    if nested:
        nest(tmp_path, "KimiK25ForConditionalGeneration", "language_model.")
    with closing(LLM(tmp_path, SETTINGS)) as llm:
        assert worst_difference(llm, reference, list(range(3, 40))) < 1e-3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny(tmp_path, "kimi-k2.5")
    return tmp_path


def rewritten(folder: Path, **tensors: torch.Tensor | None) -> None:
    stored = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: values for name, values in stored.items() if values is not None}, folder / "model.safetensors")


def test_weights_of_the_vision_tower_are_not_loaded(folder: Path) -> None:
    rewritten(
        folder, **{"vision_tower.patch_embed.proj.weight": torch.zeros(3), "mm_projector.proj.bias": torch.ones(2)}
    )
    with closing(LLM(folder, SETTINGS)):
        pass


def test_a_missing_expert_is_named(folder: Path) -> None:
    name = "language_model.model.layers.1.mlp.experts.3.up_proj.weight"
    rewritten(folder, **{name: None})
    with pytest.raises(ModelFilesError, match=name):
        LLM(folder, SETTINGS)


def test_an_expert_too_many_is_named(folder: Path) -> None:
    name = "language_model.model.layers.1.mlp.experts.6.up_proj.weight"
    rewritten(folder, **{name: torch.zeros(24, 72)})
    with pytest.raises(ModelFilesError, match=f"unexpected.*{name}"):
        LLM(folder, SETTINGS)


def test_layers_for_drafts_are_not_loaded(tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    rewritten(tmp_path, **{"model.layers.3.eh_proj.weight": torch.zeros(72, 144)})
    with closing(LLM(tmp_path, SETTINGS)):
        pass
    rewritten(tmp_path, **{"model.layers.4.eh_proj.weight": torch.zeros(72, 144)})
    with pytest.raises(ModelFilesError, match=r"model\.layers\.4\.eh_proj"):
        LLM(tmp_path, SETTINGS)
