"""What dense families share: fields of config.json, and where a decoder's weights lie. Registers nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.decoder import DecoderConfig
from stoker.layers.rope import RopeConfig
from stoker.models.contract import Rule, field


def read_config(hf: Mapping[str, Any], *, qk_norm: bool) -> DecoderConfig:
    hidden_size = field(hf, "hidden_size", int)
    num_heads = field(hf, "num_attention_heads", int)
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFilesError(f"config.json: hidden_act {activation!r} is not served, only 'silu'")
    max_positions = field(hf, "max_position_embeddings", int)
    return DecoderConfig(
        vocab_size=field(hf, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=field(hf, "intermediate_size", int),
        num_layers=field(hf, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=field(hf, "num_key_value_heads", int, num_heads),
        head_dim=hf.get("head_dim") or hidden_size // num_heads,
        norm_eps=field(hf, "rms_norm_eps", float),
        rope=read_rope(hf, max_positions),
        max_positions=max_positions,
        tie_embeddings=field(hf, "tie_word_embeddings", bool, False),
        attention_bias=field(hf, "attention_bias", bool, False),
        mlp_bias=field(hf, "mlp_bias", bool, False),
        qk_norm=qk_norm,
    )


def read_rope(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Newer configs have all in rope_parameters, older ones rope_theta and rope_scaling."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelFilesError(f"config.json: rope type {kind!r} is not served, only default, linear and llama3")
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_positions=int(scaling.get("original_max_position_embeddings", max_positions)),
    )


def decoder_rules(config: DecoderConfig) -> list[Rule]:
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp_rows = config.intermediate_size
    rules = [Rule("model.embed_tokens.weight", "embedding"), Rule("model.norm.weight", "norm.weight")]
    if not config.tie_embeddings:
        rules.append(Rule("lm_head.weight", "head.weight"))
    for i in range(config.num_layers):
        src, dst = f"model.layers.{i}.", f"layers.{i}."
        rules += [
            Rule(f"{src}input_layernorm.weight", f"{dst}attention_norm.weight"),
            Rule(f"{src}post_attention_layernorm.weight", f"{dst}mlp_norm.weight"),
        ]
        if config.qk_norm:
            rules += [Rule(f"{src}self_attn.{x}_norm.weight", f"{dst}attention.{x}_norm.weight") for x in "qk"]
        for kind in ["weight"] + ["bias"] * config.attention_bias:
            rules += [
                Rule(f"{src}self_attn.q_proj.{kind}", f"{dst}attention.qkv.{kind}", 0, q_rows),
                Rule(f"{src}self_attn.k_proj.{kind}", f"{dst}attention.qkv.{kind}", q_rows, kv_rows),
                Rule(f"{src}self_attn.v_proj.{kind}", f"{dst}attention.qkv.{kind}", q_rows + kv_rows, kv_rows),
                Rule(f"{src}self_attn.o_proj.{kind}", f"{dst}attention.out.{kind}"),
            ]
        for kind in ["weight"] + ["bias"] * config.mlp_bias:
            rules += [
                Rule(f"{src}mlp.gate_proj.{kind}", f"{dst}mlp.gate_up.{kind}", 0, mlp_rows),
                Rule(f"{src}mlp.up_proj.{kind}", f"{dst}mlp.gate_up.{kind}", mlp_rows, mlp_rows),
                Rule(f"{src}mlp.down_proj.{kind}", f"{dst}mlp.down.{kind}"),
            ]
    return rules


def decoder_ignored(config: DecoderConfig) -> frozenset[str]:
    """Old checkpoints carry rotary tables, and some a head that is the embedding once more."""
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return frozenset(tables | ({"lm_head.weight"} if config.tie_embeddings else set()))
