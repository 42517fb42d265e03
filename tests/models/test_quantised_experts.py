"""8-bit and 4-bit experts give the answers of the same model with the dequantised weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models.test_quantised import PROMPT, engine
from safetensors.torch import load_file, save_file
from tiny_quantised import BLOCKS, MOE, SCHEMES, SHAPE, compressed, ints, make_moe, worst_difference

from stoker.base.errors import ModelFilesError
from stoker.kernels.quant import QuantWeight
from stoker.layers import quant
from stoker.layers.moe import MoeConfig, MoeMlp, Routing
from stoker.layers.quant import PLAIN, Fp8, Int4, Stored
from stoker.models.family import Rule, family_of
from stoker.models.quantisation import read_quantisation

# What Kimi K2 does not quantise: everything but the experts.
KIMI_IGNORES = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_answers_are_those_of_the_dequantised_weights(tmp_path: Path, scheme: str) -> None:
    reference = make_moe(tmp_path, scheme)
    assert worst_difference(engine(tmp_path), reference, PROMPT) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("Glm4MoeForCausalLM", "compressed channel"),
        ("MiniMaxM2ForCausalLM", "fp8 blocks"),
        ("MiniMaxM2ForCausalLM", "int4 groups of 32"),
    ],
)
def test_partly_rotated_heads_may_be_quantised(tmp_path: Path, architecture: str, scheme: str) -> None:
    """The outputs of q and k are reordered with their scales."""
    kept = {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]} if scheme == "fp8 blocks" else {}
    reference = make_moe(tmp_path, scheme, architecture=architecture, **kept)
    assert worst_difference(engine(tmp_path), reference, PROMPT) < 1e-4


def test_experts_alone_may_be_quantised(tmp_path: Path) -> None:
    reference = make_moe(tmp_path, "int4 groups of 32", lambda name: ".experts." in name, ignore=KIMI_IGNORES)
    assert worst_difference(engine(tmp_path), reference, PROMPT) < 1e-4


def test_one_of_an_experts_weights_may_stay_unquantised(tmp_path: Path) -> None:
    ignore = ["lm_head", r"re:.*experts\.\d+\.down_proj"]
    reference = make_moe(tmp_path, "compressed channel", lambda name: "down_proj" not in name, ignore=ignore)
    assert worst_difference(engine(tmp_path), reference, PROMPT) < 1e-4


def test_every_tensor_of_an_expert_is_needed(tmp_path: Path) -> None:
    make_moe(tmp_path, "fp8 blocks")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFilesError, match=f"1 missing.*{name}"):
        engine(tmp_path)


def hf(**changes: Any) -> dict[str, Any]:
    return {**SHAPE, **MOE, "rms_norm_eps": 1e-6, "architectures": ["Qwen3MoeForCausalLM"], **changes}


def test_experts_of_one_layer_are_stored_alike() -> None:
    said = compressed("pack-quantized", ints(32), None, ignore=["lm_head", "model.layers.1.mlp.experts.2.up_proj"])
    with pytest.raises(ModelFilesError, match=r"experts\.0\.gate_proj and model.layers.1.mlp.experts\.2\.up_proj diff"):
        family_of(hf(quantization_config=said), "here")


def test_weights_and_scales_go_to_their_experts_place() -> None:
    rules = family_of(hf(quantization_config=BLOCKS), "here").rules
    one, mlp = "model.layers.1.mlp.experts.3.", "layers.1.mlp."
    assert Rule(f"{one}gate_proj.weight", f"{mlp}gate_up.weight", 6 * 160, 160) in rules
    assert Rule(f"{one}up_proj.weight", f"{mlp}gate_up.weight", 7 * 160, 160) in rules
    assert Rule(f"{one}up_proj.weight_scale_inv", f"{mlp}gate_up.weight_scale_inv", 7 * 2, 2) in rules
    assert Rule(f"{one}down_proj.weight_scale_inv", f"{mlp}down.weight_scale_inv", 3 * 2, 2) in rules
    assert Rule("model.layers.1.mlp.gate.weight", f"{mlp}router") in rules


def test_many_names_of_many_experts_are_read_quickly() -> None:
    """Qwen3-30B-A3B-FP8 lists three unquantised modules per layer, and has 18,432 expert modules."""
    kept = [
        f"model.layers.{i}.{x}" for i in range(48) for x in ("mlp.gate", "input_layernorm", "post_attention_layernorm")
    ]
    found = read_quantisation({"quantization_config": {**BLOCKS, "modules_to_not_convert": ["lm_head", *kept]}})
    experts = [f"model.layers.{i}.mlp.experts.{j}.{x}_proj" for i in range(48) for j in range(128) for x in "abc"]
    start = time.process_time()
    assert all(found.stored_as(name) != PLAIN for name in experts)
    assert time.process_time() - start < 1.0  # it takes a tenth of that on an idle machine
    assert found.stored_as("model.layers.7.mlp.gate") == PLAIN


@pytest.mark.parametrize(
    ("stored", "num_bytes"),
    [
        (Fp8(128, 128, "weight_scale_inv", True), (3 * 256 * 256, 3 * 256 * 128)),
        (Fp8(None, None, "weight_scale", False), (3 * 256 * 256, 3 * 256 * 128)),
        (Int4(32), (3 * 256 * 128, 3 * 256 * 128)),  # the last 128 inputs are padded to 256
    ],
)
def test_a_weight_is_held_once_and_counted_whole(
    monkeypatch: pytest.MonkeyPatch, stored: Stored, num_bytes: tuple[int, int]
) -> None:
    """As on a GPU that has the kernels: the kernels use the parameters themselves, in place."""
    monkeypatch.setattr(quant, "has_kernels", lambda x, dtype: True)
    layer = MoeMlp(256, MoeConfig(3, 128, Routing(2, renormalises=True)), stored, stored)
    loaded = next(layer.gate_up.parameters()).data_ptr()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.pack()
    experts = layer._ready
    for module, weight, wanted in zip(
        (layer.gate_up, layer.down), (experts.gate_up, experts.down), num_bytes, strict=True
    ):
        assert isinstance(weight, QuantWeight)
        assert [one.data_ptr() for one in module.parameters()] == [weight.codes.data_ptr(), weight.scale.data_ptr()]
        assert next(module.parameters()).nbytes == wanted
    assert experts.gate_up.codes.data_ptr() == loaded
