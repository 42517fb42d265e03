"""The GLM-4 MoE family: GLM-4.5, GLM-4.5-Air and GLM-4.6.

Half of a head is rotated. The first layers are dense, the others have experts that are chosen with a correction, and a
shared one. Layers after the last one are for drafts (multi-token prediction); the model itself does not load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from stoker.layers.decoder import LayerConfig
from stoker.layers.mlp import MlpConfig
from stoker.layers.moe import MoeConfig
from stoker.models.decoder_family import DecoderFamily
from stoker.models.dense import (
    WeightNames,
    model_shape,
    read_attention,
    read_config,
    read_count,
    read_mlp,
    read_rotated,
    read_sigmoid_routing,
    with_stored,
)
from stoker.models.draft import DraftCheckpoint
from stoker.models.family import MODELS, field
from stoker.models.mtp import MtpCheckpoint, prediction_names

_ALL_FEATURES = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


@MODELS.register("Glm4MoeForCausalLM")
class Glm4Moe(DecoderFamily):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "glm4-moe": _ALL_FEATURES,
        "glm4-moe-air": {
            **_ALL_FEATURES,
            "n_group": 2,
            "topk_group": 2,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
            "use_qk_norm": False,
            "attention_bias": False,
            "num_hidden_layers": 2,
        },
    }

    def __init__(self, hf: Mapping[str, Any]) -> None:
        rotated = read_rotated({"partial_rotary_factor": 0.5, **hf})
        attention = read_attention(hf, qk_norm=field(hf, "use_qk_norm", bool, False), rotated=rotated)
        attention = replace(attention, out_bias=False)
        dense, sparse, num_dense = read_mlp(hf), _read_moe(hf), read_count(hf, "first_k_dense_replace")
        config = read_config(hf, lambda i: LayerConfig(attention, dense if i < num_dense else sparse), rotated=rotated)
        self._config = config = with_stored(hf, config, WeightNames(config))
        self.shape = model_shape(config, attention)
        self.kv_groups = (attention.kv_group(len(config.layers)),)
        names = WeightNames(config)
        self.rules = names.rules()
        self._hf = hf
        self.ignored = names.ignored() | prediction_names(hf, len(config.layers))

    def open_prediction(self, folder: Path) -> DraftCheckpoint:
        """See PredictsMore."""
        return MtpCheckpoint(self._hf, folder, self._config, self._names(self._config))


def _read_moe(hf: Mapping[str, Any]) -> MoeConfig:
    num_experts, width = field(hf, "n_routed_experts", int), field(hf, "moe_intermediate_size", int)
    num_shared = read_count(hf, "n_shared_experts", 1)
    shared = MlpConfig(num_shared * width) if num_shared else None
    return MoeConfig(num_experts, width, read_sigmoid_routing(hf, num_experts), shared)
