"""Checkpoints with 8-bit or 4-bit weights give the answers of the same model with the dequantised weights."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_quantised import BLOCKS, DYNAMIC, SCHEMES, compressed, floats, ints, make, worst_difference

from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.errors import ModelFilesError
from stoker.engine.llm import LLM
from stoker.layers.quant import PLAIN, Fp8, Int4
from stoker.models.quantisation import Quantisation, read_quantisation

PROMPT = [5, 17, 150, 3, 88, 21, 64]


def engine(folder: Path) -> LLM:
    sched, kv = SchedSettings(512, max_rows=4), KvSettings(8, num_blocks=64)
    return LLM(folder, EngineSettings(device="cpu", dtype="float32", num_threads=1, kv=kv, sched=sched))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_answers_are_those_of_the_dequantised_weights(tmp_path: Path, scheme: str) -> None:
    reference = make(tmp_path, scheme)
    assert worst_difference(engine(tmp_path), reference, PROMPT) < 1e-4


def test_modules_may_stay_unquantised(tmp_path: Path) -> None:
    ignore = ["lm_head", r"re:.*layers\.1\.self_attn.*", "model.layers.0.mlp.down_proj"]
    kept = ("layers.1.self_attn", "layers.0.mlp.down_proj")
    reference = make(tmp_path, "int4 groups of 32", lambda name: not any(part in name for part in kept), ignore=ignore)
    assert worst_difference(engine(tmp_path), reference, PROMPT) < 1e-4


@pytest.mark.parametrize("scheme", ["fp8 blocks", "int4 groups of 32"])
def test_every_tensor_is_needed(tmp_path: Path, scheme: str) -> None:
    make(tmp_path, scheme)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "layers.1.self_attn.v_proj" in name and "shape" not in name]:
        save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelFilesError, match=f"missing.*{name}"):
            engine(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "name", "dtype"),
    [
        # A checkpoint that was saved before its weights were quantised has scales beside plain weights.
        ("compressed channel", "q_proj.weight", torch.bfloat16),
        ("fp8 blocks", "down_proj.weight", torch.float8_e5m2),
        ("int4 groups of 32", "up_proj.weight_packed", torch.int64),
        ("int4 groups of 32", "up_proj.weight_scale", torch.int8),
    ],
)
def test_another_dtype_than_configured_is_refused_instead_of_converted(
    tmp_path: Path, scheme: str, name: str, dtype: torch.dtype
) -> None:
    make(tmp_path, scheme)
    tensors = load_file(tmp_path / "model.safetensors")
    changed = next(full for full in tensors if full.endswith(name))
    tensors[changed] = tensors[changed].float().to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFilesError, match=changed):
        engine(tmp_path)


def test_names_select_what_is_quantised() -> None:
    config = {**BLOCKS, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.3"]}
    found = read_quantisation({"quantization_config": config})
    for name, is_quantised in {
        "lm_head": False,
        "model.layers.0.mlp.gate": False,
        "model.layers.0.mlp.gate_proj": True,
        "model.layers.3.mlp.up_proj": False,
        "model.layers.30.mlp.up_proj": True,
    }.items():
        assert (found.stored_as(name) != PLAIN) == is_quantised, name


def test_a_name_takes_precedence_over_an_expression_and_that_over_a_module_kind() -> None:
    """As compressed-tensors defines it, for any order of the groups."""
    targets = {"int4": ["Linear"], "channel": [r"re:.*down_proj"], "tensor": ["model.layers.1.mlp.down_proj"]}
    groups = {
        "int4": {"format": "pack-quantized", "weights": ints(32)},
        "channel": {"format": "float-quantized", "weights": floats("channel")},
        "tensor": {"format": "float-quantized", "weights": floats("tensor")},
    }
    expected = {
        "model.layers.0.mlp.up_proj": Int4(32),
        "model.layers.0.mlp.down_proj": Fp8(1, None, "weight_scale", False),
        "model.layers.1.mlp.down_proj": Fp8(None, None, "weight_scale", False),
    }
    for order in permutations(groups):
        config = {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {name: groups[name] | {"targets": targets[name]} for name in order},
        }
        found = read_quantisation({"quantization_config": config})
        assert {name: found.stored_as(name) for name in expected} == expected, order


def test_schemes_are_distinguished() -> None:
    expected = [
        Fp8(128, 128, "weight_scale_inv", True),
        Fp8(None, None, "weight_scale", True),
        Fp8(None, None, "weight_scale", True),
        Fp8(1, None, "weight_scale", True),
        Fp8(128, 128, "weight_scale", True),
        Int4(32),
    ]
    found = [read_quantisation({"quantization_config": config}) for config, _ in SCHEMES.values()]
    assert [one.stored_as("model.layers.0.mlp.up_proj") for one in found] == expected
    assert all(one.stored_as("lm_head") == PLAIN for one in found)
    assert read_quantisation({}) == Quantisation()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({**BLOCKS, "weight_block_size": [64, 64]}, r"\[64, 64\]"),
        ({**BLOCKS, "fmt": "e5m2"}, "e5m2"),
        (compressed("pack-quantized", ints(16), None), "groups of 16"),
        (compressed("pack-quantized", ints(32, symmetric=False), None), "zero points"),
        (compressed("pack-quantized", ints(32, actorder="group"), None), "reordered"),
        (compressed("pack-quantized", ints(32, num_bits=8), None), "8-bit int"),
        (compressed("nvfp4-pack-quantized", floats("tensor_group", num_bits=4), None), "nvfp4"),
        (compressed("int-quantized", {**floats("channel"), "type": "int"}, DYNAMIC), "int-quantized"),
    ],
)
def test_an_unsupported_scheme_is_refused_by_name(config: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelFilesError, match=f"{what}.*supported are fp8"):
        read_quantisation({"quantization_config": config})


def test_projections_fused_into_one_matmul_must_be_stored_alike(tmp_path: Path) -> None:
    make(tmp_path, "int4 groups of 32", ignore=["lm_head", "model.layers.0.self_attn.k_proj"])
    with pytest.raises(ModelFilesError, match=r"q_proj.*k_proj.*differently"):
        engine(tmp_path)
