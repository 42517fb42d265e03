"""Reads the config.json of an EAGLE-3 draft head, in the formats of EAGLE, SpecForge, SGLang and speculators.

| | EAGLE, SpecForge, SGLang | speculators |
|---|---|---|
| marked by | `architectures` | `speculators_model_type: eagle3` |
| shape of the layer | top-level fields | `transformer_layer_config` |
| tapped layers | `eagle_config`: the layer whose output is taken; top-level: the layer that is entered | top-level |
| `norm_before_residual` if missing | false | true |

The layer's attention is grouped-query attention, or latent attention (MLA) if `model_type` is that of a DeepSeek model. Its
MLP is dense in both cases: fields about experts are those of the target model, and have no meaning here.

Version 3.1 adds `fc_norm` (SGLang's older name: `use_aux_norm`) and `norm_output`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.attention import AttentionConfig
from stoker.layers.decoder import DecoderConfig, LayerConfig
from stoker.layers.mla import MlaConfig
from stoker.layers.mlp import MlpConfig
from stoker.models.dense import read_attention, read_config, read_mlp, read_rope
from stoker.models.family import ModelShape, field, list_field
from stoker.models.latent import check_latent_fields, read_latent_attention

_HALVES = (
    "DeepSeekForCausalLMEagle3"  # TorchSpec's own export; it rotates halves of a head, if config.json does not say
)
ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM", _HALVES,
)  # fmt: skip
_PLAIN_LLAMA = "LlamaForCausalLM"  # what EAGLE's own heads name; a draft_vocab_size tells them from a whole model
_QK_NORMS = {"llama": False, "qwen3": True}  # model_type of layers with GQA -> whether q and k have norms
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")  # of layers with latent attention
_MAX_TAPS = 8


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head for one target model."""

    layer: DecoderConfig  # with the head's only layer; vocab_size is the target model's
    attention: AttentionConfig | MlaConfig  # of that layer
    mlp: MlpConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]  # the layers of the target model whose input is a feature, ascending
    norm_before_residual: bool  # the residual starts from the normed features
    norm_before_fc: bool  # one norm over all features
    fc_norm: bool  # one norm for each feature
    norm_output: bool  # the next position gets the normed output

    @property
    def grouped_attention(self) -> AttentionConfig:
        """The attention of a head that has no latent attention."""
        assert isinstance(self.attention, AttentionConfig), "the head has latent attention"
        return self.attention


def read_eagle3_config(hf: Mapping[str, Any], target: ModelShape) -> Eagle3Config:
    """Return the head that a config.json describes. Raises ModelFilesError if it does not fit to the target model."""
    is_speculators = _check_kind(hf)
    layer_fields = field(hf, "transformer_layer_config", dict) if is_speculators else hf
    attention, mlp, layer = _read_layer(layer_fields)
    target_hidden_size = field(hf, "target_hidden_size", int, layer.hidden_size)
    _check_equal("target_hidden_size" if "target_hidden_size" in hf else "hidden_size", target_hidden_size,
                 target.hidden_size)  # fmt: skip
    _check_equal("vocab_size", layer.vocab_size, target.vocab_size)
    draft_vocab_size = field(hf, "draft_vocab_size", int, layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise ModelFilesError(
            f"config.json: draft_vocab_size {draft_vocab_size} is more than the vocab_size {layer.vocab_size}"
        )
    nested = _nested(hf)
    norm_before_fc = _flag(nested, "norm_before_fc", _flag(hf, "norm_before_fc", False))
    fc_norm = _flag(hf, "fc_norm", _flag(hf, "use_aux_norm", False))
    if norm_before_fc and fc_norm:
        raise ModelFilesError("config.json: norm_before_fc and fc_norm exclude each other, and both are set")
    return Eagle3Config(
        layer=layer,
        attention=attention,
        mlp=mlp,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=_read_taps(hf, nested, target.num_layers),
        norm_before_residual=_flag(hf, "norm_before_residual", is_speculators),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=_flag(hf, "norm_output", False),
    )


def _check_kind(hf: Mapping[str, Any]) -> bool:
    """Return True for the format of speculators, False for the others. Raises ModelFilesError if it is no EAGLE-3
    head."""
    if (kind := hf.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise ModelFilesError(f"config.json: speculators_model_type {kind!r} is not supported, only 'eagle3'")
        return True
    found = hf.get("architectures")
    names = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
    is_known = any(name in ARCHITECTURES for name in names)
    if not is_known and not (_PLAIN_LLAMA in names and hf.get("draft_vocab_size") is not None):
        raise ModelFilesError(
            f"config.json: architectures {found!r} are no EAGLE-3 draft head; supported are: "
            f"{', '.join(ARCHITECTURES)}, and speculators_model_type 'eagle3'",
            code="unknown_architecture",
        )
    return False


def _read_layer(hf: Mapping[str, Any]) -> tuple[AttentionConfig | MlaConfig, MlpConfig, DecoderConfig]:
    """Return the head's attention and MLP, and a decoder of that one layer."""
    for name in ("quantization_config", "compression_config"):
        if hf.get(name):
            raise ModelFilesError(f"config.json: {name} is not supported in a draft head; use its unquantised version")
    if "sliding_attention" in list_field(hf, "layer_types"):
        raise ModelFilesError("config.json: sliding-window attention is not supported in a draft head (layer_types)")
    if (num_layers := field(hf, "num_hidden_layers", int, 1)) != 1:
        raise ModelFilesError(f"config.json: num_hidden_layers is {num_layers}, an EAGLE-3 head has 1")
    if (scale := field(hf, "logit_scale", float, 1.0)) != 1.0:
        raise ModelFilesError(f"config.json: logit_scale {scale} is not supported, only 1")
    # Every head has a norm after its layer and its own list of positions; read_config wants the fields of a whole model.
    whole = {"num_hidden_layers": 1, "max_position_embeddings": 2048, **_without_nulls(hf)}
    attention, mlp = _read_attention(whole), read_mlp(whole)
    rope_width = attention.rope if isinstance(attention, MlaConfig) else None
    return attention, mlp, read_config(whole, lambda _: LayerConfig(attention, mlp), rope_width=rope_width)


def _read_attention(hf: Mapping[str, Any]) -> AttentionConfig | MlaConfig:
    kind = field(hf, "model_type", str, "llama")
    if kind in _QK_NORMS:
        return read_attention(hf, qk_norm=_QK_NORMS[kind])
    if kind not in _LATENT_TYPES:
        raise ModelFilesError(f"config.json: model_type {kind!r} of a draft head is not supported; supported are: "
                              f"{', '.join((*_QK_NORMS, *_LATENT_TYPES))}")  # fmt: skip
    check_latent_fields(hf)
    rotates_halves = _HALVES in list_field(hf, "architectures")
    attention = read_latent_attention(
        {"rope_interleave": not rotates_halves, **hf}, read_rope(hf, field(hf, "max_position_embeddings", int))
    )
    return replace(attention, norm_eps=field(hf, "rms_norm_eps", float))


def _without_nulls(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hf.items() if value is not None}


def _read_taps(hf: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input is a feature. Engines count them differently: a nested list names the layers whose
    output is taken, a top-level list those that are entered."""
    name = "eagle_aux_hidden_state_layer_ids"
    if hf.get(name) is not None:
        ids, shift = hf[name], 0
    elif nested.get(name) is not None:
        ids, shift = nested[name], 1
    else:
        ids, shift = [2, num_layers // 2, num_layers - 3], 0
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise ModelFilesError(f"config.json: {name} must be a list of layer numbers, found {ids!r}")
    taps = tuple(sorted(number + shift for number in ids))
    if not 0 < len(set(taps)) == len(taps) <= _MAX_TAPS:
        raise ModelFilesError(f"config.json: {name} must be 1 to {_MAX_TAPS} different layers, found {ids}")
    if taps[0] < 0 or taps[-1] > num_layers:
        raise ModelFilesError(f"config.json: {name} is {ids}, and the target model has {num_layers} layers")
    if (count := field(hf, "num_aux_hidden_states", int, len(taps))) != len(taps):
        raise ModelFilesError(f"config.json: num_aux_hidden_states is {count}, and {name} is {ids}")
    return taps


def _nested(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = hf.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ModelFilesError(f"config.json: 'eagle_config' must be an object, found {nested!r}")
    if not _flag(nested, "use_aux_hidden_state", True):
        raise ModelFilesError("config.json: use_aux_hidden_state is false; a head without features of several layers is "
                              "not supported")  # fmt: skip
    return nested


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(field(fields, name, bool, default))


def _check_equal(name: str, ours: int, targets: int) -> None:
    if ours != targets:
        raise ModelFilesError(f"config.json: {name} is {ours}, and that of the target model is {targets}; "
                              "the draft head belongs to another model")  # fmt: skip
