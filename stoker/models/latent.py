"""Multi-head latent attention in checkpoints: its fields in config.json and the names of its weights, as DeepSeek has them.
Registers nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.decoder import LayerConfig
from stoker.layers.mla import MlaConfig
from stoker.layers.rope import RopeConfig, yarn_scale
from stoker.models.dense import Matmul, WeightNames, part_of
from stoker.models.family import Rule, field

# Fields of models with the same names and other computations. Ignoring one would give wrong answers.
_UNSUPPORTED = {
    "index_topk": "sparse attention (DSA)",
    "index_n_heads": "sparse attention (DSA)",
    "linear_attn_config": "linear attention",
    "full_attention_interval": "linear attention",
    "compress_ratios": "compressed attention",
    "hc_mult": "hyper-connections",
    "sliding_window": "sliding-window attention",
    "swiglu_limit": "a limit of the MLP's activation",
}


def check_latent_fields(hf: Mapping[str, Any]) -> None:
    """Raise ModelFilesError for a field that asks for another attention."""
    for name, what in _UNSUPPORTED.items():
        if hf.get(name):
            raise ModelFilesError(f"config.json: {what} is not supported ({name})", code="unsupported_attention")
    num_heads = field(hf, "num_attention_heads", int)
    if (found := field(hf, "num_key_value_heads", int, num_heads)) != num_heads:
        raise ModelFilesError(
            f"config.json: num_key_value_heads is {found} and num_attention_heads {num_heads}; with latent attention they "
            "must be equal"
        )


def read_latent_attention(hf: Mapping[str, Any], rope: RopeConfig) -> MlaConfig:
    """Return the latent attention that config.json describes, the same for all layers."""
    nope, rope_width = field(hf, "qk_nope_head_dim", int), field(hf, "qk_rope_head_dim", int)
    if rope_width % 2:
        raise ModelFilesError(
            f"config.json: qk_rope_head_dim {rope_width} is odd: rotary embeddings need an even number"
        )
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    scale = (nope + rope_width) ** -0.5
    if rope.kind == "yarn" and scaling.get("mscale_all_dim"):
        scale *= yarn_scale(rope.factor, field(scaling, "mscale_all_dim", float)) ** 2
    q_rank = None if hf.get("q_lora_rank") is None else field(hf, "q_lora_rank", int)
    bias = field(hf, "attention_bias", bool, False)
    if bias and q_rank is None:
        raise ModelFilesError("config.json: attention_bias is not supported without q_lora_rank")
    return MlaConfig(
        num_heads=field(hf, "num_attention_heads", int),
        q_rank=q_rank,
        latent=field(hf, "kv_lora_rank", int),
        nope=nope,
        rope=rope_width,
        value=field(hf, "v_head_dim", int),
        scale=scale,
        bias=bias,
        interleaved=field(hf, "rope_interleave", bool, True),
    )


class LatentNames(WeightNames):
    """The checkpoint's names of the weights of a decoder with latent attention, as DeepSeek has them."""

    def attention_matmuls(self, attention: Any, src: str, dst: str) -> Iterator[Matmul]:
        assert isinstance(attention, MlaConfig)
        own, mine, q_size = f"{src}self_attn.", f"{dst}attention.", attention.q_size
        q_into = {f"{own}q_proj": q_size} if attention.q_rank is None else {f"{own}q_a_proj": attention.q_rank}
        into = q_into | {f"{own}kv_a_proj_with_mqa": attention.shape.width}
        # Ranks split the heads. Each has all of the latent and of the low-rank q.
        heads, q_rank = self._shard.piece, attention.q_rank
        q = part_of(q_size, heads)
        into_outs = (q if q_rank is None else range(q_rank), range(attention.shape.width))
        yield Matmul(f"{mine}into", into, self._hidden_size, attention.bias, outs=into_outs)
        if q_rank is not None:
            yield Matmul(f"{mine}q_up", {f"{own}q_b_proj": q_size}, q_rank, outs=(q,))
        expanded = attention.num_heads * (attention.nope + attention.value)
        outs = (part_of(expanded, heads),)
        yield Matmul(f"{mine}kv_up", {f"{own}kv_b_proj": expanded}, attention.latent, outs=outs)
        values, bias = attention.num_heads * attention.value, attention.bias and not self._shard.is_partial
        out = {f"{own}o_proj": self._hidden_size}
        yield Matmul(f"{mine}out", out, values, bias, ins=part_of(values, heads))

    def layer_rules(self, layer: LayerConfig, src: str, dst: str) -> Iterator[Rule]:
        yield from super().layer_rules(layer, src, dst)
        assert isinstance(layer.attention, MlaConfig)
        if layer.attention.q_rank is not None:
            yield Rule(f"{src}self_attn.q_a_layernorm.weight", f"{dst}attention.q_norm.weight")
        yield Rule(f"{src}self_attn.kv_a_layernorm.weight", f"{dst}attention.latent_norm.weight")
