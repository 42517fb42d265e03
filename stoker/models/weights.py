"""safetensors -> a model's parameters, by its rules. Strict both ways: every tensor is used once, every parameter is filled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stoker.base.errors import ModelFilesError
from stoker.models.contract import Model, Rule

Progress = Callable[[int, int], None]


def safetensors_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelFilesError(f"{index}: no weight_map can be read from it ({error}); fetch it again") from error
        return {name: folder / file for name, file in names.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelFilesError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    with _open(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


def load(model: Model, rules: list[Rule], ignored: frozenset[str], folder: Path, progress: Progress) -> None:
    files = safetensors_files(folder)
    wanted = {rule.source: rule for rule in rules}
    _check_names(set(files), set(wanted), ignored, folder)
    parameters = dict(model.named_parameters())
    filled: dict[str, int] = {}
    by_file: dict[Path, list[Rule]] = {}
    for rule in rules:
        by_file.setdefault(files[rule.source], []).append(rule)
    done = 0
    for file, file_rules in by_file.items():
        with _open(file) as tensors:
            for rule in file_rules:
                try:
                    tensor = tensors.get_tensor(rule.source)
                except SafetensorError as error:
                    raise ModelFilesError(
                        f"{file}: tensor {rule.source!r} cannot be read ({error}); fetch it again"
                    ) from error
                _fill(parameters[rule.target], tensor, rule, file)
                filled[rule.target] = filled.get(rule.target, 0) + tensor.numel()
                done += 1
                progress(done, len(rules))
    for name, parameter in parameters.items():
        if filled.get(name, 0) != parameter.numel():
            raise ModelFilesError(
                f"{folder}: parameter {name} {tuple(parameter.shape)} got {filled.get(name, 0)} of {parameter.numel()} values"
            )


def parameter_slices(model: Model, rules: list[Rule]) -> Iterator[tuple[str, Tensor]]:
    """Each checkpoint tensor's place in the model, by the checkpoint's name."""
    parameters = dict(model.named_parameters())
    for rule in rules:
        yield rule.source, _place(parameters[rule.target], rule)


def _open(file: Path) -> safe_open:  # type: ignore[valid-type]
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ModelFilesError(f"{file} is missing; fetch the model's folder again") from error
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{file} is not a whole safetensors file ({error}); fetch it again") from error


def _check_names(found: set[str], wanted: set[str], ignored: frozenset[str], folder: Path) -> None:
    missing, unexpected = wanted - found, found - wanted - ignored
    if missing or unexpected:
        parts = [
            f"{len(names)} {what}, first {', '.join(sorted(names)[:3])}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise ModelFilesError(f"{folder}: the weights are not those of config.json's architecture: {'; '.join(parts)}")


def _place(parameter: Tensor, rule: Rule) -> Tensor:
    return parameter if rule.count is None else parameter.narrow(0, rule.first, rule.count)


def _fill(parameter: Tensor, tensor: Tensor, rule: Rule, file: Path) -> None:
    place = _place(parameter, rule)
    if place.shape != tensor.shape:
        raise ModelFilesError(
            f"{file}: tensor {rule.source!r} is {tuple(tensor.shape)}, config.json promises {tuple(place.shape)}"
        )
    with torch.no_grad():
        place.copy_(tensor)
