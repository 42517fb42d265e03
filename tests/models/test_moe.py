"""Models with experts: the answers of transformers for any mixture, and invalid configurations are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.test_transformers import prompt_logits
from tiny import SHAPE, SHAPES, make_tiny

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.errors import ModelFilesError
from stoker.engine.build import build_engine
from stoker.engine.llm import LLM
from stoker.kernels.linear import Norm
from stoker.kernels.moe import Experts, add_experts_ref, interleave_gate_up
from stoker.kernels.moe_choice import ExpertRouter, Routing
from stoker.layers.quant import all_plain
from stoker.models.family import family_of
from stoker.sched.request import SamplingParams

MOE = SHAPES["qwen3-moe"][1]
SETTINGS = EngineSettings(device="cpu", num_threads=1, kv=KvSettings(8, 64))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        {"num_experts": 13, "num_experts_per_tok": 1, "norm_topk_prob": False},
        {"num_experts": 3, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
        {"num_experts": 16, "num_experts_per_tok": 5, "decoder_sparse_step": 3, "num_hidden_layers": 4},
        {"mlp_only_layers": [0, 2], "norm_topk_prob": False, "tie_word_embeddings": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_logits_are_those_of_transformers(changes: dict[str, Any], chunk: int, tmp_path: Path) -> None:
    reference = make_tiny(tmp_path, "qwen3-moe", **changes)
    built = build_engine(tmp_path, SETTINGS)
    token_ids = torch.randint(0, built.vocab_size, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    assert (prompt_logits(built, token_ids, chunk) - expected).abs().max() < 1e-4


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    reference = make_tiny(tmp_path, "qwen3-moe", num_experts=9, num_experts_per_tok=4)
    prompts = [[5, 7, 11, 13], list(range(20, 50))]
    found = LLM(tmp_path, SETTINGS).generate(prompts, SamplingParams(temperature=0.0), max_new_tokens=20)
    for prompt, answer in zip(prompts, found, strict=True):
        given = torch.tensor([prompt])
        expected = reference.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False)
        assert answer.token_ids == expected[0, len(prompt) :].tolist()


def test_interleaved_rows_of_gate_and_up_give_the_same() -> None:
    """The layout that the GPU kernels want."""
    torch.manual_seed(0)
    gate_up, granule = torch.randn(3, 2 * 12, 10), 4
    x, down = torch.randn(7, 10), torch.randn(3, 10, 12)
    router = ExpertRouter(torch.randn(3, 10), Routing(2, renormalises=True))
    norm = Norm(torch.randn(10), 1e-6)
    plain = add_experts_ref(x.clone(), norm, Experts(router, gate_up.clone(), down, 12))
    interleave_gate_up(gate_up, granule)
    woven = add_experts_ref(x.clone(), norm, Experts(router, gate_up, down, granule))
    assert torch.allclose(plain, woven, atol=1e-5)


def test_both_names_of_the_number_of_experts_are_read() -> None:
    hf = {**SHAPE, **MOE, "architectures": ["Qwen3MoeForCausalLM"]}
    renamed = {**hf, "num_local_experts": hf["num_experts"]}
    del renamed["num_experts"]
    assert family_of(hf, "here").rules == family_of(renamed, "here").rules


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": None}, "num_experts"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"moe_intermediate_size": "wide"}, "moe_intermediate_size"),
    ],
)
def test_an_invalid_mixture_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFilesError, match=named):
        family_of({**SHAPE, **MOE, "architectures": ["Qwen3MoeForCausalLM"], **change}, "here")


def test_a_layer_that_no_gpu_kernel_serves_is_named_before_memory_is_allocated() -> None:
    family = family_of({**SHAPE, **MOE, "architectures": ["Qwen3MoeForCausalLM"]}, "here")
    experts = replace(family._config.layers[1].mlp, num_experts=5000)  # config.json may not have that many
    with torch.device("cuda:0"), pytest.raises(ModelFilesError, match=r"layers\.1\.mlp: num_experts is 5000.* 4096"):
        experts.build(64, all_plain, "layers.1.mlp")
    with torch.device("meta"):
        experts.build(64, all_plain, "layers.1.mlp")
