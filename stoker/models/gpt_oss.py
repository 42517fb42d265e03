"""The gpt-oss family: attention with sinks, in turn over a window and over all tokens, and experts with biases, which are
published in MXFP4 (layers/expert_storage.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from stoker.base.errors import ConfigError, ModelFilesError
from stoker.layers.attention import AttentionConfig
from stoker.layers.decoder import DecoderConfig, LayerConfig
from stoker.layers.expert_storage import MXFP4_BLOCK, FusedExperts, Mxfp4Experts
from stoker.layers.moe import Clamp, MoeConfig, Routing
from stoker.layers.quant import Stored
from stoker.models.decoder_family import DecoderFamily
from stoker.models.dense import WeightNames, cut_of, model_shape, part_of, read_attention, read_config, with_stored
from stoker.models.family import MODELS, Rule, field, list_field
from stoker.models.fused_experts import FusedCuts
from stoker.models.kv_kinds import read_kinds
from stoker.parallel.shard import WHOLE, Shard

_ALPHA = 1.702
_LAYER_KINDS = {"sliding_attention": "window", "full_attention": "full"}


@MODELS.register("GptOssForCausalLM")
class GptOss(DecoderFamily):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gpt-oss": {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 13,
            "swiglu_limit": 0.05,  # so small that the random weights of tests reach it
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        "gpt-oss-all-full": {
            "num_hidden_layers": 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["full_attention"] * 2,
            "attention_bias": False,
        },
    }

    def __init__(self, hf: Mapping[str, Any]) -> None:
        attention = replace(read_attention({"attention_bias": True, **hf}, qk_norm=False), sinks=True)
        moe = _read_moe(hf)
        num_layers = field(hf, "num_hidden_layers", int)
        kinds = list_field(hf, "layer_types") or [list(_LAYER_KINDS)[i % 2] for i in range(num_layers)]
        extents = {"window": field(hf, "sliding_window", int)} if "sliding_attention" in kinds else {}
        heads = (attention.num_kv_heads, attention.head_dim)
        self.kv_groups, groups = read_kinds(kinds, _LAYER_KINDS, extents, num_layers, *heads)
        config = read_config(hf, lambda i: LayerConfig(attention, moe, groups[i]))
        is_mxfp4, plain = _without_mxfp4(hf)
        self._is_mxfp4 = is_mxfp4
        storage = Mxfp4Experts if is_mxfp4 else FusedExperts
        experts: dict[str, Stored] = {}
        for i in range(num_layers):
            experts[f"layers.{i}.mlp.gate_up"] = storage(moe.num_experts, alternates=True)
            experts[f"layers.{i}.mlp.down"] = storage(moe.num_experts)
        config = with_stored(plain, config, GptOssNames(config, is_mxfp4))
        self._config = config = replace(config, stored={**config.stored, **experts})
        self.shape = model_shape(config, attention)
        names = GptOssNames(config, is_mxfp4)
        self.rules = names.rules()
        self.ignored = names.ignored()

    def sized(self, shard: Shard) -> Self:
        """Return a rank's part of the model. See DecoderFamily."""
        part = super().sized(shard)
        mlp = part.layers[0].mlp
        if self._is_mxfp4 and isinstance(mlp, MoeConfig) and (width := mlp.intermediate_size) % MXFP4_BLOCK:
            raise ConfigError(
                f"tp={shard.tp} ep={shard.ep}: a rank would have {width} of the inner width of each expert, and MXFP4 has scales "
                f"for {MXFP4_BLOCK} values; use --ep {shard.tp}, which gives whole experts to ranks"
            )
        return part

    def _names(self, config: DecoderConfig, shard: Shard = WHOLE) -> WeightNames:
        return GptOssNames(config, self._is_mxfp4, shard)


class GptOssNames(WeightNames):
    router = "mlp.router.weight"

    def __init__(self, config: DecoderConfig, is_mxfp4: bool, shard: Shard = WHOLE) -> None:
        super().__init__(config, shard=shard)
        self._is_mxfp4 = is_mxfp4

    def layer_rules(self, layer: LayerConfig, src: str, dst: str) -> Iterator[Rule]:
        yield from super().layer_rules(layer, src, dst)
        assert isinstance(layer.attention, AttentionConfig)
        assert isinstance(layer.mlp, MoeConfig)
        num_heads, cuts = layer.attention.num_heads, FusedCuts(layer.mlp, self._shard)
        heads = cut_of(0, part_of(num_heads, self._shard.piece), num_heads)
        yield Rule(f"{src}self_attn.sinks", f"{dst}attention.sinks", cut=heads)
        yield Rule(f"{src}mlp.router.bias", f"{dst}mlp.router_bias")
        src, dst = f"{src}mlp.experts.", f"{dst}mlp."
        yield Rule(f"{src}gate_up_proj_bias", f"{dst}gate_up_bias", cut=cuts.alternating(1))
        if self._shard.expert_piece.index == 0:
            yield Rule(f"{src}down_proj_bias", f"{dst}down_bias", cut=cuts.experts)
        if self._is_mxfp4:  # the outputs of a matrix are its rows
            for tensor in ("blocks", "scales"):
                yield Rule(f"{src}gate_up_proj_{tensor}", f"{dst}gate_up.{tensor}", cut=cuts.alternating(1))
                yield Rule(f"{src}down_proj_{tensor}", f"{dst}down.{tensor}", cut=cuts.inner(2, MXFP4_BLOCK))
        else:
            yield Rule(f"{src}gate_up_proj", f"{dst}gate_up.weight", cut=cuts.alternating(2))
            yield Rule(f"{src}down_proj", f"{dst}down.weight", cut=cuts.inner(1))


def _read_moe(hf: Mapping[str, Any]) -> MoeConfig:
    num_experts, top_k = field(hf, "num_local_experts", int), field(hf, "num_experts_per_tok", int)
    if top_k > num_experts:
        raise ModelFilesError(f"config.json: num_experts_per_tok is {top_k}, of {num_experts} experts")
    clamp = Clamp(field(hf, "swiglu_limit", float, 7.0), field(hf, "swiglu_alpha", float, _ALPHA))
    routing = Routing(top_k, renormalises=True, bias=True)
    sizes = (num_experts, field(hf, "intermediate_size", int))
    return MoeConfig(*sizes, routing, bias=True, clamp=clamp, fused=True, alternates=True)


def _without_mxfp4(hf: Mapping[str, Any]) -> tuple[bool, Mapping[str, Any]]:
    """Return whether the experts are in MXFP4, and the configuration of the other weights."""
    quantisation = hf.get("quantization_config")
    if not isinstance(quantisation, Mapping) or quantisation.get("quant_method") != "mxfp4":
        return False, hf
    for name in ("hidden_size", "intermediate_size"):
        if field(hf, name, int) % 32:
            raise ModelFilesError(f"config.json: {name} {hf[name]} is not a multiple of 32, the block size of MXFP4")
    return True, {name: value for name, value in hf.items() if name != "quantization_config"}
