"""Reads config.json's quantization_config: how the weight of each matmul is stored. Unsupported schemes are refused by
name.

Three formats are supported: `fp8` (DeepSeek's and Qwen's, one scheme for all), `compressed-tensors` (schemes for groups
of modules) and `gguf` (folders that Stoker converts from GGUF files).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import chain
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.quant import PLAIN, Fp8, Grouped, Int4, Stored
from stoker.models.family import Rule, field

_SUPPORTED = (
    "supported are fp8 (one scale per tensor, per output, or per 128x128 block), and compressed-tensors' "
    "float-quantized (the same) and pack-quantized (4-bit integers, symmetric, one scale per 32 inputs or a multiple)"
)
_BLOCK = [128, 128]
_GROUP = 32
_LAYER_MODULES = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


@dataclass(frozen=True, slots=True)
class Names:
    """A set of module names. A model with experts has tens of thousands of modules, each looked up among hundreds of
    names."""

    exact: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    parts: Mapping[str, Sequence[str]] = dataclass_field(default_factory=dict)  # dotted names, by their last word

    @classmethod
    def read(cls, names: Sequence[str]) -> Names:
        """Read names as compressed-tensors writes them: a module's name or, after `re:`, a regular expression that
        matches its beginning."""
        patterns = [name for name in names if name.startswith("re:")]
        return cls(frozenset(names) - frozenset(patterns), tuple(re.compile(name[3:]) for name in patterns))

    @classmethod
    def read_parts(cls, names: Sequence[str]) -> Names:
        """Read dotted names that may occur anywhere in a module's name."""
        parts: dict[str, list[str]] = {}
        for name in names:
            parts.setdefault(name.rpartition(".")[2], []).append(name)
        return cls(parts=parts)

    def has(self, module: str) -> bool:
        if module in self.exact or any(pattern.match(module) for pattern in self.patterns):
            return True
        words = module.split(".")
        for number, word in enumerate(words, 1):
            if word in self.parts and any(
                f".{'.'.join(words[:number])}".endswith(f".{name}") for name in self.parts[word]
            ):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that are stored alike."""

    targets: Names
    stored: Stored


@dataclass(frozen=True, slots=True)
class Quantisation:
    groups: tuple[Group, ...] = ()
    ignored: Names = dataclass_field(default_factory=Names)

    def stored_as(self, module: str) -> Stored:
        """Return how a linear module is stored, by its name in the checkpoint."""
        if self.ignored.has(module):
            return PLAIN
        # An exact name takes precedence over an expression, and an expression over "Linear", whatever the order of the
        # groups.
        named = (group.stored for group in self.groups if module in group.targets.exact)
        matched = (group.stored for group in self.groups if group.targets.has(module))
        others = (group.stored for group in self.groups if "Linear" in group.targets.exact)
        return next(chain(named, matched, others), PLAIN)

    def stored_by_name(self, module: str) -> Stored:
        """Return how a module that is not linear is stored: it must be listed by its name."""
        return next((group.stored for group in self.groups if module in group.targets.exact), PLAIN)

    def of_parts(self, modules: Sequence[str]) -> Stored:
        """Return how modules are stored that are fused into one matmul here. They must be stored alike."""
        first = self.stored_as(modules[0])
        for module in modules[1:]:
            if self.stored_as(module) != first:
                raise ModelFilesError(
                    f"config.json: quantization_config treats {modules[0]} and {module} differently; "
                    "they are fused into one matmul here"
                )
        return first


def read_quantisation(hf: Mapping[str, Any]) -> Quantisation:
    """Return how the checkpoint stores its linear modules. Raises ModelFilesError for unsupported schemes."""
    config = hf.get("quantization_config") or hf.get("compression_config")
    if config is None:
        return Quantisation()
    if not isinstance(config, Mapping):
        raise ModelFilesError(f"config.json: 'quantization_config' must be an object, found {config!r}")
    method = config.get("quant_method")
    if method == "fp8":
        return _read_fp8(config)
    if method == "compressed-tensors":
        return _read_compressed(config)
    if method == "gguf":
        return _read_gguf(config)
    raise _refusal(f"quant_method {method!r}")


def has_grouped_weights(hf: Mapping[str, Any]) -> bool:
    """Return True if all matmuls of the layers have quantised weights of a GGUF file. A float32 matmul between 8-bit ones
    would make answers depend on the batch: its last bits do, and rounding to 8 bits amplifies them."""
    quantisation, num_layers = read_quantisation(hf), hf.get("num_hidden_layers", 0)
    modules = [f"model.layers.{number}.{module}" for number in range(num_layers) for module in _LAYER_MODULES]
    return bool(modules) and all(isinstance(quantisation.stored_as(module), Grouped) for module in modules)


def matmul_rules(
    stored: Stored, sources: Sequence[str], target: str, parts: Sequence[int], num_ins: int, bias: bool
) -> list[Rule]:
    """Return the rules for the matmul `target`, which fuses the modules `sources`; `parts` has the outputs of each."""
    rules: list[Rule] = []
    firsts: dict[str, int] = {}
    rows_of = {
        part: {name: tensor.shape[0] for name, tensor in stored.tensors(part, num_ins).items()} for part in set(parts)
    }
    for source, part in zip(sources, parts, strict=True):
        rows = rows_of[part]
        for name, count in (rows | {"bias": part} if bias else rows).items():
            first = firsts.get(name, 0)
            firsts[name] = first + count
            rules.append(Rule(f"{source}.{name}", f"{target}.{name}", first, None if len(parts) == 1 else count))
    return rules


def _read_fp8(config: Mapping[str, Any]) -> Quantisation:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(f"fp8 numbers of the kind {config['fmt']!r}")
    block = config.get("weight_block_size")
    if block not in (None, _BLOCK):
        raise _refusal(f"fp8 with blocks of {block!r}")
    per_tensor, per_block = Fp8(None, None, "weight_scale", True), Fp8(128, 128, "weight_scale_inv", True)
    stored = per_tensor if block is None else per_block
    # Checkpoints in this format never quantise the head.
    kept = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return Quantisation((Group(Names.read(["Linear"]), stored),), Names.read_parts(["lm_head", *kept]))


def _read_gguf(config: Mapping[str, Any]) -> Quantisation:
    modules = config.get("modules")
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise ModelFilesError(
            f"config.json: quantization_config's 'modules' must be a list of names, found {modules!r}"
        )
    if (size := field(config, "group_size", int)) % _GROUP:
        raise _refusal(f"gguf with groups of {size}")
    return Quantisation((Group(Names(frozenset(modules)), Grouped(size)),))


def _read_compressed(config: Mapping[str, Any]) -> Quantisation:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ModelFilesError(f"config.json: quantization_config's 'config_groups' must be objects, found {groups!r}")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refusal("sparse weights")
    rotations = (config.get("transform_config") or {}).get("config_groups") or {}
    for place in (target.get("location") for group in rotations.values() for target in group.get("apply") or ()):
        if not str(place).startswith("weight_"):  # rotations of the weights are already applied to them
            raise _refusal(f"an online rotation of {place!r} (transform_config)")
    read = []
    for group in groups.values():
        kind = group.get("format") or field(config, "format", str)
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        read.append(Group(Names.read(group.get("targets") or ()), _read_weights(kind, weights, inputs)))
    ignored = config.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise ModelFilesError(f"config.json: quantization_config's 'ignore' must be a list of names, found {ignored!r}")
    return Quantisation(tuple(read), Names.read(ignored))


def _read_weights(kind: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Stored:
    number = (weights.get("type"), weights.get("num_bits"))
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    size = weights.get("group_size") or 0
    what = f"{kind} with {number[1]}-bit {number[0]} weights, strategy {strategy!r}"
    if not weights.get("symmetric", True) or weights.get("dynamic") or weights.get("actorder") in ("group", "dynamic"):
        raise _refusal(f"{what}, zero points, dynamic weights or reordered inputs")
    if kind == "float-quantized" and number == ("float", 8):
        quantises_inputs = inputs is not None and (inputs.get("type"), inputs.get("num_bits")) == number
        if strategy == "tensor":
            return Fp8(None, None, "weight_scale", quantises_inputs)
        if strategy == "channel":
            return Fp8(1, None, "weight_scale", quantises_inputs)
        if strategy == "block" and block == _BLOCK:
            return Fp8(128, 128, "weight_scale", quantises_inputs)
    is_grouped = strategy == "group" and size > 0 and size % _GROUP == 0
    if kind == "pack-quantized" and number == ("int", 4) and inputs is None and is_grouped:
        return Int4(size)
    raise _refusal(f"{what}, groups of {size}, blocks of {block}, inputs {inputs}")


def _refusal(what: str) -> ModelFilesError:
    return ModelFilesError(f"config.json: quantization_config has {what}; {_SUPPORTED}", code="unknown_quantisation")
