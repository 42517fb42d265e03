"""What config.json's quantization_config says -> how the weight of each product is stored. What is not served is refused by name.

Two ways of saying it: `fp8` (DeepSeek's and Qwen's, one scheme for all) and `compressed-tensors` (schemes for groups of modules).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.layers.quant import PLAIN, Fp8, Int4, Stored
from stoker.models.contract import Rule, field

_SERVED = (
    "served are fp8 (a scale for a tensor, an output, or 128x128 blocks) and compressed-tensors' float-quantized (the same) and "
    "pack-quantized (4-bit integers, symmetric, a scale for each 32 inputs or a multiple of that)"
)
_BLOCK = [128, 128]
_GROUP = 32


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that are stored alike."""

    targets: tuple[str, ...]
    stored: Stored


@dataclass(frozen=True, slots=True)
class Quantisation:
    groups: tuple[Group, ...] = ()
    ignored: tuple[str, ...] = ()

    def stored_as(self, module: str) -> Stored:
        """`module`: a linear one, by the checkpoint's name."""
        if not _names(self.ignored, module):
            for group in self.groups:
                if "Linear" in group.targets or _names(group.targets, module):
                    return group.stored
        return PLAIN

    def of_parts(self, modules: Sequence[str]) -> Stored:
        """Of modules whose products are one here."""
        first, *others = [self.stored_as(module) for module in modules]
        if any(other != first for other in others):
            raise ModelFilesError(
                f"config.json: quantization_config treats {', '.join(modules)} differently; they are one product here"
            )
        return first


def read_quantisation(hf: Mapping[str, Any]) -> Quantisation:
    said = hf.get("quantization_config") or hf.get("compression_config")
    if said is None:
        return Quantisation()
    if not isinstance(said, Mapping):
        raise ModelFilesError(f"config.json: 'quantization_config' must be an object, found {said!r}")
    method = said.get("quant_method")
    if method == "fp8":
        return _read_fp8(said)
    if method == "compressed-tensors":
        return _read_compressed(said)
    raise _refusal(f"quant_method {method!r}")


def refuse_quantised(hf: Mapping[str, Any], module: str) -> None:
    """For modules that are served only with plain weights."""
    if (stored := read_quantisation(hf).stored_as(module)) != PLAIN:
        raise _refusal(f"{stored} weights of {module}, which are served only in the model's own dtype")


def product_rules(
    stored: Stored, sources: Sequence[str], target: str, parts: Sequence[int], num_ins: int, bias: bool
) -> list[Rule]:
    """For the product `target` of the modules `sources`, with so many outputs each."""
    rules: list[Rule] = []
    firsts: dict[str, int] = {}
    for source, part in zip(sources, parts, strict=True):
        rows = {name: tensor.shape[0] for name, tensor in stored.tensors(part, num_ins).items()}
        for name, count in (rows | {"bias": part} if bias else rows).items():
            first = firsts.get(name, 0)
            firsts[name] = first + count
            rules.append(Rule(f"{source}.{name}", f"{target}.{name}", first, None if len(parts) == 1 else count))
    return rules


def _read_fp8(said: Mapping[str, Any]) -> Quantisation:
    if said.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(f"fp8 numbers of the kind {said['fmt']!r}")
    block = said.get("weight_block_size")
    if block not in (None, _BLOCK):
        raise _refusal(f"fp8 with blocks of {block!r}")
    whole, blocks = Fp8(None, None, "weight_scale", True), Fp8(128, 128, "weight_scale_inv", True)
    stored = whole if block is None else blocks
    # Whoever writes these leaves the head alone.
    kept = said.get("modules_to_not_convert") or said.get("ignored_layers") or ()
    return Quantisation(
        (Group(("Linear",), stored),), ("lm_head", *(rf"re:(.*\.)?{re.escape(name)}(\.|$)" for name in kept))
    )


def _read_compressed(said: Mapping[str, Any]) -> Quantisation:
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ModelFilesError(f"config.json: quantization_config's 'config_groups' must be objects, found {groups!r}")
    if (said.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refusal("sparse weights")
    read = []
    for group in groups.values():
        kind = group.get("format") or field(said, "format", str)
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        read.append(Group(tuple(group.get("targets") or ()), _read_weights(kind, weights, inputs)))
    return Quantisation(tuple(read), tuple(said.get("ignore") or ()))


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


def _names(patterns: Sequence[str], module: str) -> bool:
    """A pattern is a module's name or, after `re:`, an expression that its begin matches."""
    return any(
        re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module
        for pattern in patterns
    )


def _refusal(what: str) -> ModelFilesError:
    return ModelFilesError(f"config.json: quantization_config asks for {what}; {_SERVED}", code="unknown_quantisation")
