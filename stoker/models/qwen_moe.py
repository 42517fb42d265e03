"""The Qwen3-MoE family: dense Qwen3 with experts in place of most layers' MLP."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, ClassVar

from stoker.base.errors import ModelFilesError
from stoker.layers.moe import MoeConfig, Routing
from stoker.models.family import MODELS, field, list_field
from stoker.models.qwen import Qwen3


@MODELS.register("Qwen3MoeForCausalLM")
class Qwen3Moe(Qwen3):
    # Few experts, so that each of them is chosen by one of a few tokens.
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qwen3-moe": {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "num_hidden_layers": 2,
        },
        "qwen3-moe-mixed": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    }

    @staticmethod
    def _num_full_attention(hf: Mapping[str, Any]) -> int:
        return 0

    @staticmethod
    def _read_moe(hf: Mapping[str, Any]) -> MoeConfig:
        num_experts = hf["num_local_experts"] if "num_local_experts" in hf else hf.get("num_experts")
        num_experts = field({"num_experts": num_experts}, "num_experts", int)
        top_k = field(hf, "num_experts_per_tok", int)
        if not 0 < top_k <= num_experts:
            raise ModelFilesError(f"config.json: num_experts_per_tok is {top_k}, of {num_experts} experts")
        return MoeConfig(
            num_experts=num_experts,
            intermediate_size=field(hf, "moe_intermediate_size", int),
            routing=Routing(top_k, renormalises=field(hf, "norm_topk_prob", bool, False)),
        )

    @staticmethod
    def _sparse_layers(hf: Mapping[str, Any]) -> Container[int]:
        every = field(hf, "decoder_sparse_step", int, 1)
        dense = list_field(hf, "mlp_only_layers")
        num_layers = field(hf, "num_hidden_layers", int)
        return frozenset(i for i in range(num_layers) if (i + 1) % every == 0 and i not in dense)
