"""The DeepSeek-V3 family: DeepSeek-V3, R1 and V3.1, Kimi K2, and the text model of Kimi K2.5.

Multi-head latent attention, dense first layers, then experts that are chosen with a correction among groups, and one
shared expert. Layers after the last one are for drafts (multi-token prediction); the model itself does not load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from stoker.base.errors import ModelFilesError
from stoker.layers.decoder import DecoderConfig, LayerConfig
from stoker.layers.mlp import MlpConfig
from stoker.layers.moe import MoeConfig
from stoker.models.decoder_family import DecoderFamily
from stoker.models.dense import (
    WeightNames,
    read_config,
    read_count,
    read_mlp,
    read_rope,
    read_sigmoid_routing,
    with_stored,
)
from stoker.models.draft import DraftCheckpoint
from stoker.models.family import MODELS, ModelShape, field
from stoker.models.latent import LatentNames, check_latent_fields, read_latent_attention
from stoker.models.mtp import MtpCheckpoint, prediction_names
from stoker.parallel.shard import WHOLE, Shard

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_ALL_FEATURES = {
    "num_key_value_heads": 6,
    "head_dim": 16,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 6,  # few, so that each of them is chosen by one of a few tokens
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rope_parameters": _YARN,
}


@MODELS.register("DeepseekV3ForCausalLM")
class DeepseekV3(DecoderFamily):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "deepseek": _ALL_FEATURES,
        "kimi-k2": {
            **_ALL_FEATURES,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {**_YARN, "rope_theta": 50000.0, "beta_fast": 1.0},
        },
        "deepseek-plain-q": {**_ALL_FEATURES, "q_lora_rank": None, "norm_topk_prob": False, "rope_parameters": None},
    }
    _prefix = ""
    _not_text: ClassVar[frozenset[str]] = frozenset()  # checkpoint tensors of other parts than the text model

    def __init__(self, hf: Mapping[str, Any]) -> None:
        _check_supported(hf)
        self._hf = hf
        rope_width = field(hf, "qk_rope_head_dim", int)
        rope = read_rope(hf, field(hf, "max_position_embeddings", int))
        attention, dense, sparse = read_latent_attention(hf, rope), read_mlp(hf), _read_moe(hf)
        num_dense = read_count(hf, "first_k_dense_replace")
        config = read_config(
            hf,
            lambda number: LayerConfig(attention, dense if number < num_dense else sparse),
            rope_width=rope_width,
        )
        self._config = config = with_stored(hf, config, LatentNames(config, self._prefix))
        self.shape = ModelShape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_positions=config.max_positions,
            num_layers=len(config.layers),
            num_kv_heads=attention.num_heads,
            head_dim=attention.nope + attention.rope,
            num_heads=attention.num_heads,
            active_weights=config.active_weights,
        )
        self.kv_groups = (attention.kv_group(len(config.layers)),)
        names = LatentNames(config, self._prefix)
        self.rules = names.rules()
        self.ignored = names.ignored() | prediction_names(hf, len(config.layers), self._prefix) | self._not_text

    def _names(self, config: DecoderConfig, shard: Shard = WHOLE) -> WeightNames:
        return LatentNames(config, self._prefix, shard)

    def open_prediction(self, folder: Path) -> DraftCheckpoint:
        """See PredictsMore."""
        return MtpCheckpoint(self._hf, folder, self._config, self._names(self._config))


@MODELS.register("KimiK25ForConditionalGeneration")
class KimiK25(DeepseekV3):
    """The text model of Kimi K2.5. Its config.json nests that of the text model. Images are not supported."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"kimi-k2.5": DeepseekV3.examples["kimi-k2"]}
    _prefix = "language_model."
    _not_text = frozenset({"vision_tower.", "mm_projector.", "multi_modal_projector."})

    def __init__(self, hf: Mapping[str, Any]) -> None:
        text = field(hf, "text_config", dict)
        shared = {name: hf[name] for name in ("quantization_config", "tie_word_embeddings") if hf.get(name) is not None}
        super().__init__(_without_prefix({**shared, **text}, self._prefix))


def _without_prefix(hf: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """Remove the prefix from names of modules that are not quantised. Some files have it, some do not."""
    said = hf.get("quantization_config")
    if not isinstance(said, Mapping) or not isinstance(said.get("ignore"), list):
        return hf
    ignored = [name.removeprefix(prefix) if isinstance(name, str) else name for name in said["ignore"]]
    return {**hf, "quantization_config": {**said, "ignore": ignored}}


def _check_supported(hf: Mapping[str, Any]) -> None:
    check_latent_fields(hf)
    for name, served in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if (found := hf.get(name, served)) != served:
            raise ModelFilesError(f"config.json: {name} {found!r} is not supported, only {served!r}")


def _read_moe(hf: Mapping[str, Any]) -> MoeConfig:
    num_experts, size = field(hf, "n_routed_experts", int), field(hf, "moe_intermediate_size", int)
    num_shared, routing = read_count(hf, "n_shared_experts"), read_sigmoid_routing(hf, num_experts)
    return MoeConfig(num_experts, size, routing, MlpConfig(num_shared * size) if num_shared else None)
