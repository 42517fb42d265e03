"""The Qwen3-MoE family: dense Qwen3 with experts in the place of most layers' MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.moe import MoeConfig
from stoker.models.contract import MODELS, Rule, field
from stoker.models.dense import decoder_rules
from stoker.models.quantisation import refuse_quantised
from stoker.models.qwen import Qwen3


@MODELS.register("Qwen3MoeForCausalLM")
class Qwen3Moe(Qwen3):
    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__(hf)
        refuse_quantised(hf, "model.layers.0.mlp.experts.0.down_proj")
        moe = read_moe(hf)
        self._config = replace(self._config, moe=moe)
        self.rules = decoder_rules(self._config) + expert_rules(moe, self._config.hidden_size)


def read_moe(hf: Mapping[str, Any]) -> MoeConfig:
    num_experts = hf["num_local_experts"] if "num_local_experts" in hf else hf.get("num_experts")
    num_experts = field({"num_experts": num_experts}, "num_experts", int)
    top_k = field(hf, "num_experts_per_tok", int)
    if not 0 < top_k <= num_experts:
        raise ModelFilesError(f"config.json: num_experts_per_tok is {top_k}, of {num_experts} experts")
    every = field(hf, "decoder_sparse_step", int, 1)
    dense = set(hf.get("mlp_only_layers") or [])
    num_layers = field(hf, "num_hidden_layers", int)
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=field(hf, "moe_intermediate_size", int),
        renormalises=field(hf, "norm_topk_prob", bool, False),
        layers=frozenset(i for i in range(num_layers) if (i + 1) % every == 0 and i not in dense),
    )


def expert_rules(moe: MoeConfig, hidden_size: int) -> list[Rule]:
    width = moe.intermediate_size
    rules = []
    for i in sorted(moe.layers):
        src, dst = f"model.layers.{i}.mlp.", f"layers.{i}.mlp."
        rules.append(Rule(f"{src}gate.weight", f"{dst}router"))
        for j in range(moe.num_experts):
            one = f"{src}experts.{j}."
            rules += [
                Rule(f"{one}gate_proj.weight", f"{dst}gate_up", 2 * j * width, width),
                Rule(f"{one}up_proj.weight", f"{dst}gate_up", (2 * j + 1) * width, width),
                Rule(f"{one}down_proj.weight", f"{dst}down", j * hidden_size, hidden_size),
            ]
    return rules
