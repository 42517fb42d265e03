"""What the families share: reading config.json, and the weight rules of a decoder with or without experts. Registers
nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.decoder import DecoderConfig
from stoker.layers.moe import MoeConfig
from stoker.layers.quant import PLAIN, Grouped, Int4, Stored
from stoker.layers.rope import RopeConfig
from stoker.models.family import Rule, field
from stoker.models.quantisation import matmul_rules, read_quantisation


def read_config(hf: Mapping[str, Any], *, qk_norm: bool, moe: MoeConfig | None) -> DecoderConfig:
    """Return the decoder that config.json describes. Raises ModelFilesError for what is not supported."""
    hidden_size = field(hf, "hidden_size", int)
    num_heads = field(hf, "num_attention_heads", int)
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFilesError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
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
    if config.num_heads % config.num_kv_heads:
        raise ModelFilesError(
            f"config.json: num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelFilesError(f"config.json: head_dim {config.head_dim} is odd: rotary embeddings need an even number")
    return replace(config, stored=read_stored(hf, config))


def read_rope(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read the rotary embedding settings. New configs use rope_parameters, old ones rope_theta and rope_scaling. A
    config that has both must agree, so that a scaling added by hand is not ignored."""
    scalings = {name: hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name)}
    for name, scaling in scalings.items():
        if not isinstance(scaling, Mapping):
            raise ModelFilesError(f"config.json: {name} must be an object, found {scaling!r}")
    thetas = [place["rope_theta"] for place in (*scalings.values(), hf) if place.get("rope_theta") is not None]
    theta = field({"rope_theta": thetas[0] if thetas else 10_000.0}, "rope_theta", float)
    ropes = [_scaled_rope(scaling, theta, max_positions) for scaling in scalings.values()] or [RopeConfig(theta)]
    if ropes[0] != ropes[-1]:
        raise ModelFilesError("config.json: rope_parameters and rope_scaling disagree; keep one of them")
    for place in (*scalings.values(), hf):
        if (part := field(place, "partial_rotary_factor", float, 1.0)) != 1.0:
            raise ModelFilesError(
                f"config.json: partial_rotary_factor {part} is not supported: whole heads are rotated"
            )
    return ropes[0]


def _scaled_rope(scaling: Mapping[str, Any], theta: float, max_positions: int) -> RopeConfig:
    if nested := [name for name, part in scaling.items() if isinstance(part, Mapping)]:
        raise ModelFilesError(
            f"config.json: separate rope parameters per layer type are not supported ({', '.join(nested)})"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, field(scaling, "factor", float))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            field(scaling, "factor", float),
            field(scaling, "low_freq_factor", float),
            field(scaling, "high_freq_factor", float),
            field(scaling, "original_max_position_embeddings", int, max_positions),
        )
    raise ModelFilesError(f"config.json: rope type {kind!r} is not supported, only default, linear and llama3")


@dataclass(frozen=True, slots=True)
class _Matmul:
    """A matmul of the model, with the checkpoint modules that are fused into it and their outputs."""

    target: str
    parts: dict[str, int]
    num_ins: int
    bias: bool = False


def _matmuls(config: DecoderConfig) -> Iterator[_Matmul]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden_size, mlp_size = config.hidden_size, config.intermediate_size
    if not config.tie_embeddings:
        yield _Matmul("head", {"lm_head": config.vocab_size}, hidden_size)
    for i in range(config.num_layers):
        src, dst = f"model.layers.{i}.", f"layers.{i}."
        qkv = {f"{src}self_attn.{x}_proj": kv_size if x in "kv" else q_size for x in "qkv"}
        yield _Matmul(f"{dst}attention.qkv", qkv, hidden_size, config.attention_bias)
        yield _Matmul(f"{dst}attention.out", {f"{src}self_attn.o_proj": hidden_size}, q_size, config.attention_bias)
        if (moe := config.moe) is not None and i in moe.layers:
            experts = [f"{src}mlp.experts.{j}." for j in range(moe.num_experts)]
            gate_up = {f"{expert}{x}_proj": moe.intermediate_size for expert in experts for x in ("gate", "up")}
            yield _Matmul(f"{dst}mlp.gate_up", gate_up, hidden_size)
            down = {f"{expert}down_proj": hidden_size for expert in experts}
            yield _Matmul(f"{dst}mlp.down", down, moe.intermediate_size)
        else:
            gate_up = {f"{src}mlp.{x}_proj": mlp_size for x in ("gate", "up")}
            yield _Matmul(f"{dst}mlp.gate_up", gate_up, hidden_size, config.mlp_bias)
            yield _Matmul(f"{dst}mlp.down", {f"{src}mlp.down_proj": hidden_size}, mlp_size, config.mlp_bias)


def read_stored(hf: Mapping[str, Any], config: DecoderConfig) -> dict[str, Stored]:
    """Return how weights are stored, for each matmul whose weights are not plain."""
    quantisation = read_quantisation(hf)
    found = {}
    if (embedding := quantisation.stored_by_name("model.embed_tokens")) != PLAIN:
        found["embedding"] = embedding
    for matmul in _matmuls(config):
        stored = quantisation.of_parts(list(matmul.parts))
        if isinstance(stored, Int4 | Grouped) and matmul.num_ins % stored.group:
            raise ModelFilesError(
                f"config.json: quantization_config has groups of {stored.group} inputs, {next(iter(matmul.parts))} has "
                f"{matmul.num_ins}"
            )
        if stored != PLAIN:
            found[matmul.target] = stored
    return found


def decoder_rules(config: DecoderConfig) -> list[Rule]:
    """Return which parameter each checkpoint tensor fills."""
    rules = [Rule("model.norm.weight", "norm.weight")]
    embedding = config.stored_as("embedding")
    rules += matmul_rules(
        embedding, ["model.embed_tokens"], "embedding", [config.vocab_size], config.hidden_size, bias=False
    )
    for matmul in _matmuls(config):
        sources, parts = list(matmul.parts), list(matmul.parts.values())
        stored = config.stored_as(matmul.target)
        rules += matmul_rules(stored, sources, matmul.target, parts, matmul.num_ins, matmul.bias)
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
    """Return the checkpoint tensors that are known and not loaded: rotary tables of old checkpoints, a head that
    repeats the embedding, scales for inputs, and scales for KV. Those are one per tensor; 8-bit KV has finer ones, which
    are computed while it is written."""
    names = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    if config.tie_embeddings:
        names.add("lm_head.weight")
    for matmul in _matmuls(config):
        names |= {f"{source}.{name}" for source in matmul.parts for name in config.stored_as(matmul.target).unused}
    names |= {f"model.layers.{i}.self_attn.{x}_scale" for i in range(config.num_layers) for x in "qkv"}
    return frozenset(names)
