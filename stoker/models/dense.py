"""What families share: fields of config.json, and where a decoder's weights lie, experts' too. Registers nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.decoder import DecoderConfig
from stoker.layers.moe import MoeConfig
from stoker.layers.quant import PLAIN, Stored
from stoker.layers.rope import RopeConfig
from stoker.models.contract import Rule, field
from stoker.models.quantisation import product_rules, read_quantisation


def read_config(hf: Mapping[str, Any], *, qk_norm: bool, moe: MoeConfig | None) -> DecoderConfig:
    hidden_size = field(hf, "hidden_size", int)
    num_heads = field(hf, "num_attention_heads", int)
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFilesError(f"config.json: hidden_act {activation!r} is not served, only 'silu'")
    max_positions = field(hf, "max_position_embeddings", int)
    config = DecoderConfig(
        vocab_size=field(hf, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=field(hf, "intermediate_size", int),
        num_layers=field(hf, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=field(hf, "num_key_value_heads", int, num_heads),
        head_dim=field(hf, "head_dim", int) if hf.get("head_dim") else hidden_size // num_heads,
        norm_eps=field(hf, "rms_norm_eps", float),
        rope=read_rope(hf, max_positions),
        max_positions=max_positions,
        tie_embeddings=field(hf, "tie_word_embeddings", bool, False),
        attention_bias=field(hf, "attention_bias", bool, False),
        mlp_bias=field(hf, "mlp_bias", bool, False),
        qk_norm=qk_norm,
        moe=moe,
    )
    return replace(config, stored=read_stored(hf, config))


def read_rope(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Newer configs have all in rope_parameters, older ones rope_theta and rope_scaling."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelFilesError(f"config.json: rope_parameters or rope_scaling must be an object, found {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelFilesError(f"config.json: rope type {kind!r} is not served, only default, linear and llama3")
    theta = scaling.get("rope_theta") or hf.get("rope_theta") or 10_000.0
    return RopeConfig(
        theta=field({"rope_theta": theta}, "rope_theta", float),
        kind=kind,
        factor=field(scaling, "factor", float, 1.0),
        low_freq_factor=field(scaling, "low_freq_factor", float, 1.0),
        high_freq_factor=field(scaling, "high_freq_factor", float, 4.0),
        original_positions=field(scaling, "original_max_position_embeddings", int, max_positions),
    )


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of the model, and the modules of the checkpoint that it is made of, with their outputs."""

    target: str
    parts: dict[str, int]
    num_ins: int
    bias: bool = False


def _products(config: DecoderConfig) -> Iterator[_Product]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden_size, mlp_size = config.hidden_size, config.intermediate_size
    if not config.tie_embeddings:
        yield _Product("head", {"lm_head": config.vocab_size}, hidden_size)
    for i in range(config.num_layers):
        src, dst = f"model.layers.{i}.", f"layers.{i}."
        qkv = {f"{src}self_attn.{x}_proj": kv_size if x in "kv" else q_size for x in "qkv"}
        yield _Product(f"{dst}attention.qkv", qkv, hidden_size, config.attention_bias)
        yield _Product(f"{dst}attention.out", {f"{src}self_attn.o_proj": hidden_size}, q_size, config.attention_bias)
        if (moe := config.moe) is not None and i in moe.layers:
            experts = [f"{src}mlp.experts.{j}." for j in range(moe.num_experts)]
            gate_up = {f"{one}{x}_proj": moe.intermediate_size for one in experts for x in ("gate", "up")}
            yield _Product(f"{dst}mlp.gate_up", gate_up, hidden_size)
            down = {f"{one}down_proj": hidden_size for one in experts}
            yield _Product(f"{dst}mlp.down", down, moe.intermediate_size)
        else:
            gate_up = {f"{src}mlp.{x}_proj": mlp_size for x in ("gate", "up")}
            yield _Product(f"{dst}mlp.gate_up", gate_up, hidden_size, config.mlp_bias)
            yield _Product(f"{dst}mlp.down", {f"{src}mlp.down_proj": hidden_size}, mlp_size, config.mlp_bias)


def read_stored(hf: Mapping[str, Any], config: DecoderConfig) -> dict[str, Stored]:
    """How the weights of products are stored that are not plain."""
    quantisation = read_quantisation(hf)
    found = {}
    for product in _products(config):
        stored = quantisation.of_parts(list(product.parts))
        if stored != PLAIN:
            found[product.target] = stored
    return found


def decoder_rules(config: DecoderConfig) -> list[Rule]:
    rules = [Rule("model.embed_tokens.weight", "embedding"), Rule("model.norm.weight", "norm.weight")]
    for product in _products(config):
        sources, parts = list(product.parts), list(product.parts.values())
        stored = config.stored_as(product.target)
        rules += product_rules(stored, sources, product.target, parts, product.num_ins, product.bias)
    for i in range(config.num_layers):
        src, dst = f"model.layers.{i}.", f"layers.{i}."
        rules += [
            Rule(f"{src}input_layernorm.weight", f"{dst}attention_norm.weight"),
            Rule(f"{src}post_attention_layernorm.weight", f"{dst}mlp_norm.weight"),
        ]
        if config.moe is not None and i in config.moe.layers:
            rules.append(Rule(f"{src}mlp.gate.weight", f"{dst}mlp.router"))
        if config.qk_norm:
            rules += [Rule(f"{src}self_attn.{x}_norm.weight", f"{dst}attention.{x}_norm.weight") for x in "qk"]
    return rules


def decoder_ignored(config: DecoderConfig) -> frozenset[str]:
    """Old checkpoints carry rotary tables, and some a head that is the embedding once more. Quantised ones carry scales for what
    is not quantised here, inputs and KV."""
    names = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    if config.tie_embeddings:
        names.add("lm_head.weight")
    for product in _products(config):
        names |= {f"{source}.{name}" for source in product.parts for name in config.stored_as(product.target).unused}
    if config.stored:
        names |= {f"model.layers.{i}.self_attn.{x}_scale" for i in range(config.num_layers) for x in "qkv"}
    return frozenset(names)
