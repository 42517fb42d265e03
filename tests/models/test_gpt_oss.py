"""gpt-oss with experts in MXFP4, in files with the published layout, computes what transformers computes with the
dequantised weights."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_transformers import prompt_logits
from tiny import make_tiny
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stoker.base.config import EngineSettings, KvSettings, RankSettings
from stoker.base.errors import ConfigError, ModelFilesError
from stoker.engine.build import build_engine
from stoker.engine.llm import LLM
from stoker.kernels.quant import QuantWeight, dequantise_ref
from stoker.layers import expert_storage
from stoker.layers.expert_storage import FusedExperts, Mxfp4Experts
from tests.parallel.rank_cases import ParityGrammars, answers, requests
from tests.parallel.rank_cases import settings as rank_settings
from tests.parallel.virtual_ranks import VirtualRanks

SETTINGS = EngineSettings(device="cpu", num_threads=1, kv=KvSettings(8, 64))


def random_mxfp4(num_experts: int, outs: int, ins: int, spread: int) -> tuple[Tensor, Tensor]:
    """Return blocks and scales, which differ by at most 2**spread."""
    blocks = torch.randint(0, 256, (num_experts, outs, ins // 32, 16), dtype=torch.uint8)
    scales = torch.randint(127 - 5 - spread, 127 - 5 + 1, (num_experts, outs, ins // 32), dtype=torch.uint8)
    return blocks, scales


def make_mxfp4(tmp_path: Path, **changes: int) -> torch.nn.Module:
    """Write a model with experts in MXFP4, and return the reference."""
    reference = make_tiny(tmp_path, "gpt-oss", hidden_size=96, **changes)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(1)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, ins, outs = tensors.pop(name).shape
        blocks, scales = random_mxfp4(num_experts, outs, ins, 3)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        reference.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    not_converted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": not_converted}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return reference


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    return tmp_path, make_mxfp4(tmp_path, intermediate_size=64, num_local_experts=3)


@pytest.mark.parametrize("ranks", [RankSettings(2, 1, 1), RankSettings(4, 1, 2)], ids=str)
def test_ranks_read_their_part_of_mxfp4_experts(tmp_path: Path, ranks: RankSettings) -> None:
    make_mxfp4(tmp_path, intermediate_size=64, num_local_experts=4, num_attention_heads=8, num_key_value_heads=4)
    asked = requests(1, 4)
    with closing(LLM(tmp_path, rank_settings(), grammars=ParityGrammars())) as alone:
        wanted = answers(alone, asked)
    with closing(LLM(tmp_path, rank_settings(ranks), grammars=ParityGrammars(), ranks=VirtualRanks())) as llm:
        found = answers(llm, asked)
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert [one.logprob for one in ours.logprobs] == pytest.approx(
            [one.logprob for one in theirs.logprobs], abs=1e-10
        )


def test_blocks_of_mxfp4_are_not_divided(tmp_path: Path) -> None:
    make_mxfp4(tmp_path, intermediate_size=64, num_local_experts=4, num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(ConfigError, match=r"tp=4 ep=1: a rank would have 16 of the inner width .* use --ep 4"):
        LLM(tmp_path, rank_settings(RankSettings(4)), ranks=VirtualRanks())


def test_mxfp4_experts_give_the_logits_of_transformers(folder: tuple[Path, torch.nn.Module]) -> None:
    path, reference = folder
    built = build_engine(path, SETTINGS)
    token_ids = torch.randint(0, built.vocab_size, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    assert (prompt_logits(built, token_ids, 23) - expected).abs().max() < 1e-4


def test_a_missing_scale_is_named(folder: tuple[Path, torch.nn.Module]) -> None:
    path, _reference = folder
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.down_proj_scales")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFilesError, match=r"missing.*model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        build_engine(path, SETTINGS)


@pytest.mark.parametrize("alternates", [False, True])
@pytest.mark.parametrize("spread", [0, 40])
def test_the_kernels_weight_has_the_values_of_mxfp4(
    alternates: bool, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    num_experts, outs, ins = 3, 12, 96
    blocks, scales = random_mxfp4(num_experts, outs, ins, spread)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    storage, parts = Mxfp4Experts(num_experts, alternates), (num_experts * outs,)
    plain = storage.ready({"blocks": blocks.clone(), "scales": scales.clone()}, parts, ins, torch.float32, None)
    monkeypatch.setattr(expert_storage, "has_kernels", lambda x, dtype: True)
    weight = storage.ready({"blocks": blocks, "scales": scales}, parts, ins, torch.bfloat16, None)
    assert isinstance(weight, QuantWeight)
    assert isinstance(plain, Tensor)
    assert torch.equal(dequantise_ref(weight, torch.float32), plain)
    assert weight.codes.nbytes == num_experts * outs * 256 // 2, "4 bits each, padded to 256 inputs"
    fused = FusedExperts(num_experts, alternates).ready({"weight": expected.clone()}, parts, ins, torch.float32, None)
    assert isinstance(fused, Tensor)
    assert torch.equal(fused, plain)
