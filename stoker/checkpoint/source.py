"""MODEL, as a user names it, -> a folder that the engine loads.

MODEL is nothing (the embedded SmolLM2), a folder, a GGUF file, or a repository's name on the Hugging Face Hub.
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
    path: Path  # config.json, tokenizer.json, safetensors
    name: str  # what the model is called in the API
    origin: str  # where it came from, for people


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("STOKER_CACHE"):
        return Path(chosen).expanduser()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "stoker"
    return Path(environ.get("HOME", "~")).expanduser() / ".cache" / "stoker"


def resolve_model(model: str | None, cache_dir: Path, progress: Progress, offline: bool = False) -> ModelFolder:
    """The folder for MODEL, made or downloaded if need be. `offline` promises that the network is not used."""
    if model is None:
        return _embedded(cache_dir, progress, offline)
    path = Path(model).expanduser()
    if model and os.path.isdir(path):  # an empty name is no name for the folder that we are in
        return _folder(path.resolve(), cache_dir, progress)
    if os.path.isfile(path) and path.suffix == ".gguf":
        return _gguf(path.resolve(), cache_dir, progress)
    match = _REPOSITORY.fullmatch(model)
    if match and not os.path.exists(path) and path.suffix != ".gguf":
        folder = download_repository(match["name"], match["revision"], progress, offline)
        check_folder(folder)
        return ModelFolder(folder, match["name"], f"repository {model}")
    raise ModelFilesError(
        f"MODEL {model!r} is {'no GGUF file' if os.path.exists(path) else 'not there'}. It may be a folder with config.json, "
        "tokenizer.json and safetensors; a .gguf file, or a folder with one; org/name or org/name@revision on the "
        f"Hugging Face Hub; or nothing, for {embedded.NAME}"
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
        raise ModelFilesError(f"{path} has {len(files)} GGUF files ({names}): name the one to serve")
    raise ModelFilesError(f"{path} is not a model's folder: it has neither config.json nor a .gguf file")


def _gguf(path: Path, cache_dir: Path, progress: Progress) -> ModelFolder:
    # Hashing the content of a large file would take longer than loading it; a changed file has another time or size.
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    folder = _place(cache_dir, path.stem, identity)
    built = build_once(folder, FORMAT_VERSION, lambda into: convert_gguf(path, into, progress), progress)
    return ModelFolder(built, path.stem, f"file {path}")


def _place(cache_dir: Path, name: str, identity: str) -> Path:
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_dir.absolute() / "models" / f"{safe_name(name)}-{digest}"
