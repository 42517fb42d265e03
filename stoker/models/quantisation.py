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
from functools import cached_property
from typing import Any

from stoker.base.errors import ConfigError, ModelFilesError
from stoker.layers.quant import PLAIN, Fp8, Grouped, Int4, Stored
from stoker.models.family import Rule, SourceSlice, field, list_field

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
        try:
            compiled = tuple(re.compile(name[3:]) for name in patterns)
        except re.error as error:
            raise ModelFilesError(
                f"config.json: quantization_config has an invalid regular expression {error.pattern!r}: {error}"
            ) from error
        return cls(frozenset(names) - frozenset(patterns), compiled)

    @classmethod
    def read_parts(cls, names: Sequence[str]) -> Names:
        """Read dotted names that may occur anywhere in a module's name."""
        parts: dict[str, list[str]] = {}
        for name in names:
            parts.setdefault(name.rpartition(".")[2], []).append(name)
        return cls(parts=parts)

    def has(self, module: str) -> bool:
        if module in self.exact:
            return True
        for pattern in self.patterns:
            if pattern.match(module):
                return True
        if not self.parts:
            return False
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


@dataclass(frozen=True)  # no slots: they would exclude cached properties
class Quantisation:
    groups: tuple[Group, ...] = ()
    ignored: Names = dataclass_field(default_factory=Names)

    def stored_as(self, module: str) -> Stored:
        """Return how a linear module is stored, by its name in the checkpoint."""
        if self.ignored.has(module):
            return PLAIN
        # An exact name takes precedence over an expression, and an expression over "Linear", whatever the order of the
        # groups.
        for group in self.groups:
            if module in group.targets.exact:
                return group.stored
        for group in self.groups:
            if group.targets.has(module):
                return group.stored
        return self._other

    @cached_property
    def _other(self) -> Stored:
        """How linear modules are stored that no group names."""
        return next((group.stored for group in self.groups if "Linear" in group.targets.exact), PLAIN)

    def stored_by_name(self, module: str) -> Stored:
        """Return how a module that is not linear is stored: it must be listed by its name."""
        return next((group.stored for group in self.groups if module in group.targets.exact), PLAIN)

    def of_parts(self, modules: Sequence[str]) -> Stored:
        """Return how modules are stored that are fused into one matmul here. They must be stored alike."""
        first = self.stored_as(modules[0])
        for module in modules[1:]:
            if (stored := self.stored_as(module)) is not first and stored != first:
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
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping) or config.get("quant_method") != "gguf":
        return False
    quantisation, num_layers = _read_gguf(config), hf.get("num_hidden_layers", 0)
    modules = [f"model.layers.{number}.{module}" for number in range(num_layers) for module in _LAYER_MODULES]
    return bool(modules) and all(isinstance(quantisation.stored_as(module), Grouped) for module in modules)


def matmul_rules(
    stored: Stored,
    sources: Sequence[str],
    target: str,
    parts: Sequence[int],
    num_ins: int,
    bias: bool,
    outs: Sequence[range] | None = None,
    ins: range | None = None,
) -> list[Rule]:
    """Return the rules for the matmul `target`, which fuses the modules `sources`; `parts` has the outputs of each. A rank
    takes the outputs `outs` of each module, and the inputs `ins`. Raises ConfigError if a scale would have to be divided."""
    outs = outs or [range(part) for part in parts]
    ins = ins or range(num_ins)
    kinds: dict[tuple[int, range], dict[str, tuple[int, SourceSlice | None]]] = {}
    for part, taken in zip(parts, outs, strict=True):
        if (part, taken) not in kinds:
            kinds[part, taken] = _taken_tensors(stored, target, part, num_ins, taken, ins, bias)
    kinds_of = [kinds[kind] for kind in zip(parts, outs, strict=True)]
    rules: list[Rule] = []
    for name in kinds_of[0]:
        place, first = f"{target}.{name}", 0
        for source, kind in zip(sources, kinds_of, strict=True):
            count, cut = kind[name]
            rules.append(Rule(f"{source}.{name}", place, first, None if len(parts) == 1 else count, cut))
            first += count
    return rules


def _taken_tensors(
    stored: Stored, target: str, part: int, num_ins: int, outs: range, ins: range, bias: bool
) -> dict[str, tuple[int, SourceSlice | None]]:
    """Return, for each tensor of a module, the rows in the rank's parameter, and the slice of the checkpoint's tensor."""
    taken: dict[str, tuple[int, SourceSlice | None]] = {}
    rows = stored.tensors(len(outs), len(ins))
    for name, whole in stored.tensors(part, num_ins).items():
        cut = None
        for axis, (size, wanted) in enumerate(((part, outs), (num_ins, ins))):
            if len(wanted) < size and axis < len(whole.shape) and whole.shape[axis] > 1:
                assert cut is None, f"{target}: split by outputs and inputs"
                cut = _cut(stored, f"{target}.{name}", axis, whole.shape[axis], size, wanted)
        taken[name] = (rows[name].shape[0], cut)
    if bias:
        taken["bias"] = (len(outs), None if len(outs) == part else SourceSlice(0, outs.start, len(outs), part))
    return taken


def _cut(stored: Stored, name: str, axis: int, entries: int, size: int, wanted: range) -> SourceSlice:
    """Return the slice of a tensor's axis with `entries` entries for `size` outputs or inputs."""
    block = (stored.row_block, stored.col_block)[axis] if isinstance(stored, Fp8) and entries < size else None
    block = block or size // entries
    if wanted.start % block or (wanted.stop % block and wanted.stop < size):
        raise ConfigError(
            f"{name}: a rank would get {len(wanted)} of {size} values, and {block} of them share a scale or a word; use fewer "
            "ranks"
        )
    first = wanted.start // block
    return SourceSlice(axis, first, -(-wanted.stop // block) - first, entries)


def _read_fp8(config: Mapping[str, Any]) -> Quantisation:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(f"fp8 numbers of the kind {config['fmt']!r}")
    block = config.get("weight_block_size")
    if block not in (None, _BLOCK):
        raise _refusal(f"fp8 with blocks of {block!r}")
    per_tensor, per_block = Fp8(None, None, "weight_scale", True), Fp8(128, 128, "weight_scale_inv", True)
    stored = per_tensor if block is None else per_block
    # Checkpoints in this format never quantise the head.
    kept = _names(config, "modules_to_not_convert") or _names(config, "ignored_layers")
    return Quantisation((Group(Names.read(["Linear"]), stored),), Names.read_parts(["lm_head", *kept]))


def _read_gguf(config: Mapping[str, Any]) -> Quantisation:
    field(config, "modules", list)  # a folder without this list is not one of Stoker's
    modules = _names(config, "modules")
    if (size := field(config, "group_size", int)) % _GROUP:
        raise _refusal(f"gguf with groups of {size}")
    return Quantisation((Group(Names(frozenset(modules)), Grouped(size)),))


def _read_compressed(config: Mapping[str, Any]) -> Quantisation:
    if field(config, "sparsity_config", dict, {}).get("format", "dense") != "dense":
        raise _refusal("sparse weights")
    for rotation in _objects(field(config, "transform_config", dict, {}), "config_groups"):
        for place in (one.get("location") for one in _objects(rotation, "apply")):
            if not str(place).startswith("weight_"):  # rotations of the weights are already applied to them
                raise _refusal(f"an online rotation of {place!r} (transform_config)")
    read = []
    field(config, "config_groups", dict)
    for group in _objects(config, "config_groups"):
        kind = group.get("format") or field(config, "format", str)
        weights, inputs = field(group, "weights", dict, {}), group.get("input_activations")
        if inputs is not None:
            inputs = field(group, "input_activations", dict)
        read.append(Group(Names.read(_names(group, "targets")), _read_weights(kind, weights, inputs)))
    return Quantisation(tuple(read), Names.read(_names(config, "ignore")))


def _names(config: Mapping[str, Any], name: str) -> list[str]:
    """Return a field of quantization_config that lists modules, or nothing if it is missing."""
    names = list_field(config, name)
    if not all(isinstance(module, str) for module in names):
        raise ModelFilesError(f"config.json: quantization_config's {name!r} must be a list of names, found {names!r}")
    return names


def _objects(config: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the objects in a field of quantization_config, which is an object or a list of them."""
    found = config.get(name) or []
    objects = list(found.values()) if isinstance(found, Mapping) else found
    if not isinstance(objects, list) or not all(isinstance(one, Mapping) for one in objects):
        raise ModelFilesError(f"config.json: quantization_config's {name!r} must be objects, found {found!r}")
    return objects


def _read_weights(kind: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Stored:
    number = (weights.get("type"), weights.get("num_bits"))
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    size = weights.get("group_size") or 0
    if not isinstance(size, int):
        raise ModelFilesError(f"config.json: quantization_config's 'group_size' must be int, found {size!r}")
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
