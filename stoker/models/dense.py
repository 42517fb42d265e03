"""What the families share: reading config.json, and the weight rules of a decoder. Registers nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.attention import AttentionConfig, QkNorm
from stoker.layers.decoder import DecoderConfig, LayerConfig
from stoker.layers.mlp import MlpConfig
from stoker.layers.moe import MAX_GROUPS, MoeConfig, Routing
from stoker.layers.quant import PLAIN, Grouped, Int4, Stored
from stoker.layers.rope import RopeConfig, yarn_scale
from stoker.models.family import ModelShape, Rule, SourceSlice, field
from stoker.models.quantisation import matmul_rules, read_quantisation
from stoker.parallel.shard import WHOLE, Piece, Shard


def read_config(
    hf: Mapping[str, Any],
    layer: Callable[[int], LayerConfig],
    *,
    rope_width: int | None = None,
    rotated: int | None = None,
) -> DecoderConfig:
    """Return the decoder that config.json describes, without quantisation (`with_stored`). `layer` returns the
    configuration of a layer by its number. The rotary embedding is applied to `rope_width` values, by default to whole
    heads, and turns the first `rotated` of them, by default all. Raises ModelFilesError for what is not supported."""
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFilesError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    max_positions = field(hf, "max_position_embeddings", int)
    return DecoderConfig(
        vocab_size=field(hf, "vocab_size", int),
        hidden_size=field(hf, "hidden_size", int),
        layers=tuple(map(layer, range(field(hf, "num_hidden_layers", int)))),
        norm_eps=field(hf, "rms_norm_eps", float),
        rope=read_rope(hf, max_positions, rotated),
        rope_width=rope_width or read_head_dim(hf),
        max_positions=max_positions,
        tie_embeddings=field(hf, "tie_word_embeddings", bool, False),
    )


def read_head_dim(hf: Mapping[str, Any]) -> int:
    if hf.get("head_dim"):
        return int(field(hf, "head_dim", int))
    hidden_size, num_heads = field(hf, "hidden_size", int), field(hf, "num_attention_heads", int)
    if num_heads > hidden_size:
        raise ModelFilesError(
            f"config.json: num_attention_heads {num_heads} is more than hidden_size {hidden_size}, and head_dim is missing"
        )
    return int(hidden_size // num_heads)


def read_attention(hf: Mapping[str, Any], *, qk_norm: bool, rotated: int | None = None) -> AttentionConfig:
    """Return the grouped-query attention that config.json describes, the same for all layers. `rotated`: see
    `read_rotated`."""
    num_heads = field(hf, "num_attention_heads", int)
    config = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=field(hf, "num_key_value_heads", int, num_heads),
        head_dim=read_head_dim(hf),
        bias=field(hf, "attention_bias", bool, False),
        qk_norm_eps=field(hf, "rms_norm_eps", float) if qk_norm else None,
        rotated=rotated,
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelFilesError(
            f"config.json: num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelFilesError(f"config.json: head_dim {config.head_dim} is odd: rotary embeddings need an even number")
    return config


def read_mlp(hf: Mapping[str, Any]) -> MlpConfig:
    return MlpConfig(field(hf, "intermediate_size", int), field(hf, "mlp_bias", bool, False))


def read_count(hf: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return a number that may be 0, or missing."""
    value = hf.get(name)
    return default if value is None else 0 if value == 0 else int(field(hf, name, int))


def read_sigmoid_routing(hf: Mapping[str, Any], num_experts: int) -> Routing:
    """Return the routing with sigmoid scores and a correction. Raises ModelFilesError for numbers that do not fit."""
    top_k = field(hf, "num_experts_per_tok", int)
    num_groups, top_groups = field(hf, "n_group", int, 1), field(hf, "topk_group", int, 1)
    if not 0 < top_k <= num_experts:
        raise ModelFilesError(f"config.json: num_experts_per_tok is {top_k}, of {num_experts} experts")
    if num_experts % num_groups or not 0 < top_groups <= num_groups <= MAX_GROUPS:
        raise ModelFilesError(
            f"config.json: n_group is {num_groups} and topk_group {top_groups}, of {num_experts} experts: they must be equal "
            f"groups, at most {MAX_GROUPS}"
        )
    each = num_experts // num_groups
    if num_groups > 1 and (each < 2 or top_k > top_groups * each):
        raise ModelFilesError(
            f"config.json: {top_groups} groups of {each} experts (topk_group, n_group) are too few for num_experts_per_tok "
            f"{top_k}; a group has at least 2"
        )
    return Routing(
        top_k,
        "sigmoid",
        renormalises=field(hf, "norm_topk_prob", bool, True),
        scaling=field(hf, "routed_scaling_factor", float, 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
        correction=True,
    )


def model_shape(config: DecoderConfig, attention: AttentionConfig) -> ModelShape:
    """Return what the engine needs to know about a decoder whose layers all have this attention."""
    return ModelShape(
        config.vocab_size,
        config.hidden_size,
        config.max_positions,
        len(config.layers),
        attention.num_kv_heads,
        attention.head_dim,
        attention.num_heads,
        config.active_weights,
    )


def read_rope(hf: Mapping[str, Any], max_positions: int, rotated: int | None = None) -> RopeConfig:
    """Read the rotary embedding settings. New configs use rope_parameters, old ones rope_theta and rope_scaling. A
    config that has both must agree, so that a scaling added by hand is not ignored. `rotated`: see `read_rotated`;
    None: the family rotates whole heads."""
    scalings = _scalings(hf)
    thetas = [place["rope_theta"] for place in (*scalings.values(), hf) if place.get("rope_theta") is not None]
    theta = field({"rope_theta": thetas[0] if thetas else 10_000.0}, "rope_theta", float)
    ropes = [_scaled_rope(scaling, theta, max_positions) for scaling in scalings.values()] or [RopeConfig(theta)]
    if ropes[0] != ropes[-1]:
        raise ModelFilesError("config.json: rope_parameters and rope_scaling disagree; keep one of them")
    if rotated is None and (factor := _partial_rotary_factor(hf)) != 1.0:
        raise ModelFilesError(f"config.json: partial_rotary_factor {factor} is not supported: whole heads are rotated")
    return replace(ropes[0], rotated=rotated)


def _scalings(hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the fields with rotary settings that are there."""
    scalings = {name: hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name)}
    for name, scaling in scalings.items():
        if not isinstance(scaling, Mapping):
            raise ModelFilesError(f"config.json: {name} must be an object, found {scaling!r}")
    return scalings


def read_rotated(hf: Mapping[str, Any]) -> int:
    """Return how many values of a head are rotated, the first ones, in a family that may rotate a part of them."""
    head_dim, factor = read_head_dim(hf), _partial_rotary_factor(hf)
    rotated = int(field(hf, "rotary_dim", int, max(1, int(head_dim * factor))))
    if rotated > head_dim or rotated % 2 or (head_dim - rotated) % 2:
        raise ModelFilesError(
            f"config.json: {rotated} of a head's {head_dim} values would be rotated (partial_rotary_factor, rotary_dim); "
            "it must be an even number"
        )
    return rotated


def _partial_rotary_factor(hf: Mapping[str, Any]) -> float:
    places = (*_scalings(hf).values(), hf)
    factors = [field(place, "partial_rotary_factor", float, 1.0) for place in places]
    return float(next((factor for factor in factors if factor != 1.0), 1.0))


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
    if kind == "yarn":
        return _yarn_rope(scaling, theta, max_positions)
    raise ModelFilesError(f"config.json: rope type {kind!r} is not supported, only default, linear, llama3 and yarn")


def _yarn_rope(scaling: Mapping[str, Any], theta: float, max_positions: int) -> RopeConfig:
    if theta <= 1:
        raise ModelFilesError(f"config.json: rope_theta is {theta}, and YaRN needs more than 1")
    original = field(scaling, "original_max_position_embeddings", int, max_positions)
    factor = field(scaling, "factor", float, max_positions / original)
    mscale, mscale_all_dim = (_optional(scaling, name) for name in ("mscale", "mscale_all_dim"))
    table_scale = yarn_scale(factor)
    if mscale and mscale_all_dim:
        table_scale = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_positions=original,
        beta_fast=field(scaling, "beta_fast", float, 32.0),
        beta_slow=field(scaling, "beta_slow", float, 1.0),
        truncates=field(scaling, "truncate", bool, True),
        table_scale=field(scaling, "attention_factor", float, table_scale),
    )


def _optional(fields: Mapping[str, Any], name: str) -> float:
    """Return a factor that may be missing or 0: both mean none."""
    return float(field(fields, name, float)) if fields.get(name) else 0.0


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matmul of the model, with the checkpoint modules that are fused into it and their outputs.

    A rank takes the outputs `outs` of each module, and the inputs `ins`; None: all of them. `bias`: the rank has the bias.
    """

    target: str
    parts: Mapping[str, int]
    num_ins: int
    bias: bool = False
    outs: tuple[range, ...] | None = None
    ins: range | None = None


class WeightNames:
    """The checkpoint's names of a decoder's weights, as Llama has them. Families with other names override a part.

    `prefix` comes before all names. A layer's methods get the names of the layer in the checkpoint (`src`) and in the
    model (`dst`), both with a dot at the end. `config` is that of the whole model, and `shard` the part that a rank takes of
    it.
    """

    mlp = "mlp"
    experts = "mlp.experts"
    gate_proj, up_proj, down_proj = "gate_proj", "up_proj", "down_proj"  # of one expert
    router = "mlp.gate.weight"
    shared_expert = "mlp.shared_experts"
    correction = "mlp.gate.e_score_correction_bias"

    def __init__(self, config: DecoderConfig, prefix: str = "", shard: Shard = WHOLE) -> None:
        self._config = config
        self._shard = shard
        self._hidden_size = config.hidden_size
        self._prefix = prefix

    @property
    def prefix(self) -> str:
        """What comes before all names."""
        return self._prefix

    def matmuls(self) -> Iterator[Matmul]:
        """Return all matmuls but the embedding."""
        if not self._config.tie_embeddings and self._shard.has_ends:
            outs = (self._shard.vocabulary(self._config.vocab_size),)
            yield Matmul("head", {f"{self._prefix}lm_head": self._config.vocab_size}, self._hidden_size, outs=outs)
        for layer, src, dst in self._layers():
            yield from self.attention_matmuls(layer.attention, src, dst)
            yield from self.mlp_matmuls(layer.mlp, src, dst)

    def rules(self) -> list[Rule]:
        """Return which parameter each checkpoint tensor fills."""
        config, shard = self._config, self._shard
        rules: list[Rule] = []
        if shard.has_ends:
            rules.append(Rule(f"{self._prefix}model.norm.weight", "norm.weight"))
            embedding = Matmul("embedding", {self.embedding: config.vocab_size}, config.hidden_size)
            rules += self._rules_of(replace(embedding, outs=(shard.vocabulary(config.vocab_size),)))
        for matmul in self.matmuls():
            rules += self._rules_of(matmul)
        for layer, src, dst in self._layers():
            rules += self.layer_rules(layer, src, dst)
        if shard.layers is not None:
            for rule in rules:
                rule.target = _renumbered(rule.target, shard.layers.start)
        return rules

    def _rules_of(self, matmul: Matmul) -> list[Rule]:
        sources, parts = list(matmul.parts), list(matmul.parts.values())
        stored = self._config.stored_as(matmul.target)
        sizes = (parts, matmul.num_ins, matmul.bias)
        return matmul_rules(stored, sources, matmul.target, *sizes, matmul.outs, matmul.ins)

    def ignored(self) -> frozenset[str]:
        """Return the checkpoint tensors that are known and not loaded: rotary tables of old checkpoints, a head that
        repeats the embedding, scales for inputs, and scales for KV. Those are one per tensor; 8-bit KV has finer ones,
        which are computed while it is written."""
        names = {f"{src}self_attn.rotary_emb.inv_freq" for _, src, _ in self._layers()}
        names |= {f"{src}self_attn.{x}_scale" for _, src, _ in self._layers() for x in "qkv"}
        if self._config.tie_embeddings:
            names.add(f"{self._prefix}lm_head.weight")
        for matmul in self.matmuls():
            unused = self._config.stored_as(matmul.target).unused
            names |= {f"{source}.{name}" for source in matmul.parts for name in unused}
        return frozenset(names)

    @property
    def embedding(self) -> str:
        return f"{self._prefix}model.embed_tokens"

    def attention_matmuls(self, attention: Any, src: str, dst: str) -> Iterator[Matmul]:
        assert isinstance(attention, AttentionConfig)
        q_size, kv_size = (heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads))
        qkv = {f"{src}self_attn.{x}_proj": kv_size if x in "kv" else q_size for x in "qkv"}
        q_piece, kv_piece = self._shard.heads(attention.num_heads, attention.num_kv_heads)
        q, kv = part_of(q_size, q_piece), part_of(kv_size, kv_piece)
        yield Matmul(f"{dst}attention.qkv", qkv, self._hidden_size, attention.bias, outs=(q, kv, kv))
        has_bias = attention.bias if attention.out_bias is None else attention.out_bias
        out = {f"{src}self_attn.o_proj": self._hidden_size}
        yield Matmul(f"{dst}attention.out", out, q_size, has_bias and not self._shard.is_partial, ins=q)

    def mlp_matmuls(self, mlp: Any, src: str, dst: str) -> Iterator[Matmul]:
        hidden_size, width = self._hidden_size, mlp.intermediate_size
        if isinstance(mlp, MoeConfig):
            if not mlp.fused:
                experts = [f"{src}{self.experts}.{i}." for i in self._shard.experts(mlp.num_experts)]
                gate_up = {f"{expert}{x}": width for expert in experts for x in (self.gate_proj, self.up_proj)}
                down = {f"{expert}{self.down_proj}": hidden_size for expert in experts}
                part = part_of(width, self._shard.expert_piece)
                yield Matmul(f"{dst}mlp.gate_up", gate_up, hidden_size, outs=(part,) * len(gate_up))
                yield Matmul(f"{dst}mlp.down", down, width, ins=part)
            if mlp.shared is not None:
                yield from self._gated_matmuls(mlp.shared, f"{src}{self.shared_expert}.", f"{dst}mlp.shared.")
            return
        assert isinstance(mlp, MlpConfig)
        yield from self._gated_matmuls(mlp, f"{src}{self.mlp}.", f"{dst}mlp.")

    def _gated_matmuls(self, mlp: MlpConfig, src: str, dst: str) -> Iterator[Matmul]:
        gate_up = {f"{src}{x}_proj": mlp.intermediate_size for x in ("gate", "up")}
        part, bias = part_of(mlp.intermediate_size, self._shard.piece), mlp.bias and not self._shard.is_partial
        yield Matmul(f"{dst}gate_up", gate_up, self._hidden_size, mlp.bias, outs=(part, part))
        yield Matmul(f"{dst}down", {f"{src}down_proj": self._hidden_size}, mlp.intermediate_size, bias, ins=part)

    def layer_rules(self, layer: LayerConfig, src: str, dst: str) -> Iterator[Rule]:
        """Return the rules of the parameters that are not in matmuls."""
        yield Rule(f"{src}input_layernorm.weight", f"{dst}attention_norm.weight")
        yield Rule(f"{src}post_attention_layernorm.weight", f"{dst}mlp_norm.weight")
        if isinstance(layer.mlp, MoeConfig):
            yield Rule(f"{src}{self.router}", f"{dst}mlp.router")
            if layer.mlp.routing.correction:
                yield Rule(f"{src}{self.correction}", f"{dst}mlp.correction")
        if isinstance(layer.attention, AttentionConfig) and layer.attention.has_norm_weights:
            attention = layer.attention
            counts = (attention.num_heads, attention.num_kv_heads)
            for x, count, piece in zip("qk", counts, self._shard.heads(*counts), strict=True):
                cut = None
                if attention.qk_norm is QkNorm.ALL:
                    size = count * attention.head_dim
                    cut = cut_of(0, part_of(size, piece), size)
                yield Rule(f"{src}self_attn.{x}_norm.weight", f"{dst}attention.{x}_norm.weight", cut=cut)

    def _layers(self) -> Iterator[tuple[LayerConfig, str, str]]:
        for i in self._shard.layers_of(len(self._config.layers)):
            yield self._config.layers[i], f"{self._prefix}model.layers.{i}.", f"layers.{i}."


def part_of(size: int, piece: Piece) -> range:
    """Return a rank's part of a size that has been checked."""
    part = size // piece.of
    return range(piece.index * part, (piece.index + 1) * part)


def cut_of(axis: int, part: range, size: int) -> SourceSlice | None:
    """Return the slice of a checkpoint tensor that has a rank's part of an axis. None: all of it."""
    return None if len(part) == size else SourceSlice(axis, part.start, len(part), size)


def _renumbered(target: str, first_layer: int) -> str:
    """Return the name that a parameter has in the model of a stage, which counts its own layers."""
    words = target.split(".", 2)
    return f"layers.{int(words[1]) - first_layer}.{words[2]}" if words[0] == "layers" else target


def with_stored(hf: Mapping[str, Any], config: DecoderConfig, names: WeightNames) -> DecoderConfig:
    """Return the configuration with the storage of each matmul whose weights are not plain. `names` are those of the
    configuration."""
    found = stored_matmuls(hf, names.matmuls(), names.prefix)
    if (embedding := read_quantisation(hf).stored_by_name(names.embedding.removeprefix(names.prefix))) != PLAIN:
        found["embedding"] = embedding
    return replace(config, stored=found)


def stored_matmuls(hf: Mapping[str, Any], matmuls: Iterable[Matmul], prefix: str) -> dict[str, Stored]:
    """Return the storage of each matmul whose weights are not plain. quantization_config names modules without the
    prefix."""
    quantisation = read_quantisation(hf)
    found: dict[str, Stored] = {}
    for matmul in matmuls:
        stored = quantisation.of_parts([part.removeprefix(prefix) for part in matmul.parts])
        if isinstance(stored, Int4 | Grouped) and matmul.num_ins % stored.group:
            raise ModelFilesError(
                f"config.json: quantization_config has groups of {stored.group} inputs, {next(iter(matmul.parts))} has "
                f"{matmul.num_ins}"
            )
        if stored != PLAIN:
            found[matmul.target] = stored
    return found
