"""The Llama 4 family: Scout and Maverick, without their vision encoder.

Most layers attend within chunks and rotate neighbouring values of q and k. The others attend to all tokens, without a
rotary embedding, and more sharply at late positions. One expert is chosen per token, beside a shared one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from stoker.base.errors import ModelFilesError
from stoker.layers.attention import AttentionConfig, QkNorm, Temperature
from stoker.layers.decoder import DecoderConfig, LayerConfig
from stoker.layers.expert_storage import FusedExperts
from stoker.layers.mlp import MlpConfig
from stoker.layers.moe import MoeConfig, Routing
from stoker.layers.quant import Stored
from stoker.models.decoder_family import DecoderFamily
from stoker.models.dense import WeightNames, model_shape, read_attention, read_config, with_stored
from stoker.models.family import MODELS, Rule, field, list_field
from stoker.models.fused_experts import FusedCuts
from stoker.models.kv_kinds import read_kinds
from stoker.parallel.shard import WHOLE, Shard

_LAYER_KINDS = {"chunked_attention": "chunk", "full_attention": "full"}
_SCOUT = {
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "intermediate_size_mlp": 56,
    "num_local_experts": 2,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 19,
    "floor_scale": 16,
    "use_qk_norm": True,
    "attn_scale": 0.7,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@MODELS.register("Llama4ForCausalLM")
class Llama4(DecoderFamily):
    """The text model."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llama4-scout": _SCOUT,
        "llama4-maverick": {
            **_SCOUT,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0, 1, 1],
            "rope_parameters": None,
        },
    }
    _prefix = ""
    _not_text: ClassVar[frozenset[str]] = frozenset()  # checkpoint tensors of other parts than the text model

    def __init__(self, hf: Mapping[str, Any]) -> None:
        num_layers = field(hf, "num_hidden_layers", int)
        rotates = _read_rotating(hf, num_layers)
        kinds = list_field(hf, "layer_types") or [list(_LAYER_KINDS)[0 if turns else 1] for turns in rotates]
        if hf.get("attention_chunk_size") is None:
            kinds = ["full_attention"] * num_layers
        extents = {"chunk": field(hf, "attention_chunk_size", int)} if "chunked_attention" in kinds else {}
        local, everywhere = _read_attentions(hf)
        heads = (local.num_kv_heads, local.head_dim)
        self.kv_groups, groups = read_kinds(kinds, _LAYER_KINDS, extents, num_layers, *heads)
        is_quantised = hf.get("quantization_config") is not None or hf.get("compression_config") is not None
        sparse, dense = _read_moe(hf, fused=not is_quantised), MlpConfig(field(hf, "intermediate_size_mlp", int, 16384))
        with_experts = _sparse_layers(hf, num_layers)

        def layer(number: int) -> LayerConfig:
            attention = local if rotates[number] else everywhere
            return LayerConfig(attention, sparse if number in with_experts else dense, groups[number])

        config = read_config(hf, layer)
        config = with_stored(hf, config, Llama4Names(config, self._prefix))
        experts: dict[str, Stored] = {}
        if sparse.fused:
            storage = FusedExperts(sparse.num_experts)
            experts = {f"layers.{i}.mlp.{part}": storage for i in with_experts for part in ("gate_up", "down")}
        self._config = config = replace(config, stored={**config.stored, **experts})
        self.shape = model_shape(config, local)
        names = Llama4Names(config, self._prefix)
        self.rules = names.rules()
        self.ignored = names.ignored() | self._not_text

    def _names(self, config: DecoderConfig, shard: Shard = WHOLE) -> WeightNames:
        return Llama4Names(config, self._prefix, shard)


@MODELS.register("Llama4ForConditionalGeneration")
class Llama4WithVision(Llama4):
    """The text model in the published files, whose config.json nests it. Images are not supported."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"llama4-nested": _SCOUT}
    _prefix = "language_model."
    _not_text = frozenset({"vision_model.", "multi_modal_projector."})

    def __init__(self, hf: Mapping[str, Any]) -> None:
        text = field(hf, "text_config", dict)
        shared = {name: hf[name] for name in ("quantization_config", "compression_config") if hf.get(name) is not None}
        super().__init__({**shared, **text})


class Llama4Names(WeightNames):
    mlp = "feed_forward"
    experts = "feed_forward.experts"
    router = "feed_forward.router.weight"
    shared_expert = "feed_forward.shared_expert"

    def layer_rules(self, layer: LayerConfig, src: str, dst: str) -> Iterator[Rule]:
        yield from super().layer_rules(layer, src, dst)
        if isinstance(layer.mlp, MoeConfig) and layer.mlp.fused:
            cuts = FusedCuts(layer.mlp, self._shard)
            yield from cuts.gate_then_up(2, f"{src}{self.experts}.gate_up_proj", f"{dst}mlp.gate_up.weight")
            yield Rule(f"{src}{self.experts}.down_proj", f"{dst}mlp.down.weight", cut=cuts.inner(1))


def _read_attentions(hf: Mapping[str, Any]) -> tuple[AttentionConfig, AttentionConfig]:
    """Return the attention of layers that rotate, and of those that do not."""
    plain = read_attention(hf, qk_norm=False)
    eps = field(hf, "rms_norm_eps", float) if field(hf, "use_qk_norm", bool, True) else None
    temperature = None
    if hf.get("attn_temperature_tuning", True):  # a number in some files
        temperature = Temperature(field(hf, "attn_scale", float, 0.1), field(hf, "floor_scale", int, 8192))
    return (
        replace(plain, interleaved=True, qk_norm_eps=eps, qk_norm=QkNorm.BARE_HEADS),
        replace(plain, rotates=False, temperature=temperature),
    )


def _read_rotating(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have a rotary embedding. The field's name says the opposite of its values."""
    every = field(hf, "no_rope_layer_interval", int, 4)
    found = list_field(hf, "no_rope_layers") or [(i + 1) % every != 0 for i in range(num_layers)]
    if len(found) != num_layers or not all(turns in (0, 1) for turns in found):
        raise ModelFilesError(
            f"config.json: 'no_rope_layers' must be a list of {num_layers} numbers, each 0 or 1, found {found!r}"
        )
    return [bool(turns) for turns in found]


def _read_moe(hf: Mapping[str, Any], *, fused: bool) -> MoeConfig:
    if (top_k := field(hf, "num_experts_per_tok", int, 1)) != 1:
        raise ModelFilesError(
            f"config.json: num_experts_per_tok {top_k} is not supported with this architecture, only 1"
        )
    width = field(hf, "intermediate_size", int)
    routing = Routing(1, "sigmoid", on_input=True)
    return MoeConfig(field(hf, "num_local_experts", int), width, routing, MlpConfig(width), fused=fused)


def _sparse_layers(hf: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers with experts."""
    every = field(hf, "interleave_moe_layer_step", int, 1)
    found = hf.get("moe_layers")
    found = range(every - 1, num_layers, every) if found is None else found
    if not isinstance(found, list | range) or not all(isinstance(i, int) and 0 <= i < num_layers for i in found):
        raise ModelFilesError(
            f"config.json: 'moe_layers' must be a list of numbers from 0 to {num_layers - 1}, found {found!r}"
        )
    return frozenset(found)
