"""Tuned tiles in a file, one per GPU model: `stoker tune` writes it, and an engine reads it at its start.

Tiles depend on the GPU, on the kernels' source and on the compiler. A file of another GPU or version is ignored with a
warning, and so is a damaged one. It never stops a start.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from stoker.base import log as logs
from stoker.base.errors import ConfigError
from stoker.kernels.compiled.kernel_archive import hash_of_sources
from stoker.kernels.tuned_tiles import CHECKS, Numbers, TileKey, use_tuned_tiles

FORMAT = 1
_MAX_BYTES = 16 << 20

log = logs.EventLog("engine")


@dataclass(frozen=True, slots=True)
class TuningSystem:
    """What tuned tiles are valid for."""

    gpu: str
    kernels: str  # hash of the kernels' source
    torch_version: str
    triton_version: str
    format: int = FORMAT

    @classmethod
    def of(cls, device: torch.device) -> TuningSystem:
        """Describe this machine."""
        return cls(torch.cuda.get_device_name(device), hash_of_sources(), torch.__version__, _triton_version())


class UnusableTuning(Exception):
    """The file's tiles cannot be used here. The message says why."""


def tuning_path(folder: Path, system: TuningSystem) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', system.gpu)}.json"


def read_tuning(path: Path, system: TuningSystem) -> dict[TileKey, Numbers]:
    """Return the tuned tiles; none if there is no file. Raises UnusableTuning."""
    try:
        if not path.exists():
            return {}
        if not path.is_file():
            raise UnusableTuning("it is not a file")
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
    except OSError as error:
        raise UnusableTuning(f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableTuning("it is damaged: it is not valid JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("tiles"), list):
        raise UnusableTuning("it is damaged: it has no list of tiles")
    for name, expected in asdict(system).items():
        if found.get(name) != expected:
            raise UnusableTuning(f"it was made with {name} {str(found.get(name))[:80]!r}, and this is {expected!r}")
    return dict(_read_tile(entry) for entry in found["tiles"])


def _read_tile(entry: Any) -> tuple[TileKey, Numbers]:
    try:
        numbers = tuple(entry["tile"])
        key = TileKey(**{name: value for name, value in entry.items() if name != "tile"})
        sizes = (key.rows, key.outs, key.ins, key.experts, key.top_k, *numbers)
        is_valid = all(type(size) is int and 0 <= size < 1 << 31 for size in sizes) and key.outs > 0 and key.ins > 0
        is_valid = is_valid and CHECKS[key.kernel](key, numbers)
    except (TypeError, KeyError, ValueError):
        is_valid = False
    if not is_valid:
        raise UnusableTuning(f"it is damaged: {str(entry)[:200]} is not a tile of these kernels")
    return key, numbers


def write_tuning(path: Path, system: TuningSystem, tiles: Mapping[TileKey, Numbers]) -> None:
    """Write the file completely or not at all. Raises ConfigError if that is not possible."""
    entries = [asdict(key) | {"tile": list(tiles[key])} for key in sorted(tiles)]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    text = json.dumps(asdict(system))[:-1] + f', "tiles": [\n{lines}\n]}}\n'
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8") as file:  # follows no symbolic link that another user has put there
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"the tuning file {path} cannot be written: {error.strerror}; choose another folder with --cache-dir"
        ) from error


def load_tuning(folder: Path, device: torch.device) -> None:
    """Use the tuned tiles of this GPU, if there are any. An unusable file is ignored with one warning."""
    system = TuningSystem.of(device)
    path = tuning_path(folder, system)
    tiles: dict[TileKey, Numbers] = {}
    try:
        tiles = read_tuning(path, system)
        if not path.exists() and (others := sorted(other.name for other in folder.glob("*.json"))):
            raise UnusableTuning(f"there are files for other GPUs ({', '.join(others[:4])}) and none for {system.gpu}")
    except (UnusableTuning, OSError) as error:
        log.warning("tuning_ignored", file=str(path), reason=str(error), advice="run `stoker tune MODEL`")
    if tiles:
        log.event("tuning_used", file=str(path), tiles=len(tiles))
    use_tuned_tiles(tiles)


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"
