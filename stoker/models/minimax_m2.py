"""The MiniMax-M2 family: experts in every layer, chosen with a correction, a norm over all heads of q and of k, and heads
that are rotated in part. config.json counts modules for drafts (`num_mtp_modules`), whose weights were not published: files
that have any tensors of them are not trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from stoker.base.errors import ModelFilesError
from stoker.layers.attention import QkNorm
from stoker.layers.decoder import DecoderConfig, LayerConfig
from stoker.layers.moe import MoeConfig
from stoker.models.decoder_family import DecoderFamily
from stoker.models.dense import (
    WeightNames,
    model_shape,
    read_attention,
    read_config,
    read_count,
    read_rotated,
    read_sigmoid_routing,
    with_stored,
)
from stoker.models.draft import DraftCheckpoint
from stoker.models.family import MODELS, field, list_field
from stoker.parallel.shard import WHOLE, Shard

# What a field must say if it is there. Another value is another computation.
_SERVED = {"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
           "attention_bias": False, "shared_intermediate_size": 0}  # fmt: skip


@MODELS.register("MiniMaxM2ForCausalLM")
class MiniMaxM2(DecoderFamily):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "minimax-m2": {"num_local_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 40, "rotary_dim": 8},
    }

    def __init__(self, hf: Mapping[str, Any]) -> None:
        for name, served in _SERVED.items():
            if (found := hf.get(name)) is not None and found != served:
                raise ModelFilesError(f"config.json: {name} {found!r} is not supported, only {served!r}")
        if any(kind != 1 for kind in list_field(hf, "attn_type_list")):
            raise ModelFilesError("config.json: linear attention is not supported (attn_type_list)")
        rotated = read_rotated(hf)
        attention = replace(read_attention(hf, qk_norm=True, rotated=rotated), qk_norm=QkNorm.ALL)
        num_experts = field(hf, "num_local_experts", int)
        moe = MoeConfig(num_experts, field(hf, "intermediate_size", int), read_sigmoid_routing(hf, num_experts))
        config = read_config(hf, lambda i: LayerConfig(attention, moe), rotated=rotated)
        self._config = config = with_stored(hf, config, MiniMaxNames(config))
        self.shape = model_shape(config, attention)
        self.kv_groups = (attention.kv_group(len(config.layers)),)
        names = MiniMaxNames(config)
        self.rules = names.rules()
        drafting = range(len(config.layers), len(config.layers) + read_count(hf, "num_mtp_modules"))
        self.ignored = names.ignored() | {f"model.layers.{number}." for number in drafting}

    def open_prediction(self, folder: Path) -> DraftCheckpoint:
        """See PredictsMore. The published checkpoints have no trained weights for it."""
        raise ModelFilesError(
            f"{folder}: MiniMax-M2 is published without trained layers for drafts, whatever num_mtp_modules says; leave out "
            "the drafter 'mtp', or use eagle3:FOLDER"
        )

    def _names(self, config: DecoderConfig, shard: Shard = WHOLE) -> WeightNames:
        return MiniMaxNames(config, shard=shard)


class MiniMaxNames(WeightNames):
    experts = "block_sparse_moe.experts"
    gate_proj, up_proj, down_proj = "w1", "w3", "w2"
    router = "block_sparse_moe.gate.weight"
    correction = "block_sparse_moe.e_score_correction_bias"
