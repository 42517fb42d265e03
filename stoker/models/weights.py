"""Loads safetensors into a model's parameters by its rules. Strict both ways: every tensor is used once, every
parameter is filled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from stoker.base import garbage
from stoker.base.errors import ModelFilesError
from stoker.checkpoint.weight_files import TensorLocation, WeightReadAhead, stored_tensors
from stoker.models.family import Model, Rule, SourceSlice
from stoker.models.fill import Copy, Progress, fill

# Floating-point dtypes that are converted into each other. Quantised codes are not: their meaning depends on their
# scale.
_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Loadable(Protocol):
    """A module whose parameters can be filled."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def load(
    model: Loadable,
    rules: list[Rule],
    ignored: frozenset[str],
    folder: Path,
    progress: Progress,
    ahead: WeightReadAhead | None = None,
) -> None:
    """Load all weights. Everything is checked before the first byte is read."""
    with garbage.paused():
        copies = plan_copies(model, rules, ignored, folder)
    fill(copies, progress, ahead)


def plan_copies(model: Loadable, rules: list[Rule], ignored: frozenset[str], folder: Path) -> list[Copy]:
    """Return all copies, after checking names, shapes and dtypes."""
    stored = stored_tensors(folder)
    _check_names(set(stored), {rule.source for rule in rules}, ignored, folder)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    filled: dict[str, int] = {}  # rows of each parameter
    copies = []
    for rule in rules:
        tensor, (num_rows, *others) = stored[rule.source], shapes[rule.target]
        count = num_rows if rule.count is None else rule.count
        if (count, *others) != _taken_shape(tensor, rule.cut):
            wanted = _describe_wanted((count, *others), rule.cut)
            raise ModelFilesError(
                f"{tensor.file}: tensor {rule.source!r} is {tensor.shape}, config.json requires {wanted}"
            )
        copy = Copy.of(
            tensor, parameters[rule.target], rule.cut, None if rule.count is None else (rule.first, rule.count)
        )
        if not copy.is_plain and not (copy.dtype.is_floating_point and copy.target.dtype in _WIDE):
            raise ModelFilesError(
                f"{tensor.file}: tensor {rule.source!r} is {tensor.dtype}, config.json requires {copy.target.dtype}"
            )
        copies.append(copy)
        filled[rule.target] = filled.get(rule.target, 0) + count
    for name, parameter in parameters.items():
        if (found := filled.get(name, 0)) != len(parameter):
            raise ModelFilesError(
                f"{folder}: parameter {name} {tuple(parameter.shape)} got {found} of {len(parameter)} rows"
            )
    return copies


def _taken_shape(tensor: TensorLocation, cut: SourceSlice | None) -> tuple[int, ...] | None:
    """Return the shape of what is taken of a tensor, None if the tensor has another size along that axis."""
    shape = tensor.shape or (1,)  # a scalar may be stored without a dimension
    if cut is None:
        return shape
    if cut.rows is not None:
        if shape[0] != cut.rows.of:
            return None
        shape = (cut.rows.count, *shape[1:])
    if cut.axis >= len(shape) or shape[cut.axis] != cut.of:
        return None
    return (*shape[: cut.axis], cut.count, *shape[cut.axis + 1 :])


def _describe_wanted(shape: tuple[int, ...], cut: SourceSlice | None) -> str:
    """Describe the shape that a tensor should have."""
    if cut is None:
        return str(shape)
    if cut.rows is not None:
        shape = (cut.rows.of, *shape[1:])
    return str((*shape[: cut.axis], cut.of, *shape[cut.axis + 1 :]))


def parameter_slices(model: Model, rules: list[Rule]) -> Iterator[tuple[str, Tensor]]:
    """Yield each checkpoint tensor's name and its place in the model."""
    parameters = dict(model.named_parameters())
    for rule in rules:
        yield rule.source, _place(parameters[rule.target], rule)


def _check_names(found: set[str], wanted: set[str], ignored: frozenset[str], folder: Path) -> None:
    prefixes = tuple(name for name in ignored if name.endswith("."))
    missing = wanted - found
    unexpected = {name for name in found - wanted - ignored if not name.startswith(prefixes)}
    if missing or unexpected:
        parts = [
            f"{len(names)} {what}, first {', '.join(sorted(names)[:3])}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise ModelFilesError(f"{folder}: the weights are not those of config.json's architecture: {'; '.join(parts)}")


def _place(parameter: Tensor, rule: Rule) -> Tensor:
    return parameter if rule.count is None else parameter.narrow(0, rule.first, rule.count)
