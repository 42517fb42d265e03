"""The models on this machine: those that this project converted, and repositories in the Hugging Face Hub client's cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint import embedded
from stoker.checkpoint.cache import disk_errors, is_complete, locked
from stoker.checkpoint.gguf_folder import FORMAT_VERSION
from stoker.checkpoint.hf_folder import has_all_files
from stoker.checkpoint.progress import Progress


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be served without a download."""

    name: str  # as `remove_model` takes it
    num_bytes: int
    origin: str
    path: Path
    complete: bool
    delete: Callable[[Progress], None]


def local_models(cache_dir: Path) -> list[LocalModel]:
    """Return all models, sorted by name."""
    return sorted([*_converted(cache_dir), *_repositories()], key=lambda model: model.name)


def remove_model(name: str, cache_dir: Path, progress: Progress) -> LocalModel:
    """Delete a model's files and return what it was. A process that has loaded it keeps running."""
    models = local_models(cache_dir)
    found = [model for model in models if model.name == name]
    if not found:
        names = ", ".join(model.name for model in models) or "none"
        raise ModelFilesError(f"there is no model {name!r} on this machine; the models are: {names}")
    found[0].delete(progress)
    return found[0]


def _converted(cache_dir: Path) -> list[LocalModel]:
    folder = cache_dir.absolute() / "models"
    if not folder.is_dir():
        return []
    return [
        LocalModel(
            name=path.name,
            num_bytes=_num_bytes(path),
            origin="default model" if path.name.startswith(f"{embedded.NAME}-") else "GGUF file",
            path=path,
            complete=is_complete(path, FORMAT_VERSION),
            delete=partial(_delete_folder, path, cache_dir),
        )
        for path in folder.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    ]


def _delete_folder(path: Path, cache_dir: Path, progress: Progress) -> None:
    # Under the lock of its builder: a process that is building it finishes first.
    with disk_errors(path.parent), locked(path.parent / f".{path.name}.lock", progress):
        shutil.rmtree(path)
        if path.name.startswith(f"{embedded.NAME}-"):
            for name in (embedded.GGUF_NAME, embedded.WHEEL_NAME):
                (cache_dir / "downloads" / name).unlink(missing_ok=True)


def _repositories() -> list[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    models = []
    for repository in cache.repos:
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            path, commit = revision.snapshot_path, revision.commit_hash
            if not (path / "config.json").is_file():
                continue  # not a language model, or one in another format
            name = repository.repo_id
            if "main" not in revision.refs:
                name += f"@{min(revision.refs, default=commit)}"
            delete, complete = partial(_delete_revision, commit), has_all_files(path)
            models.append(LocalModel(name, revision.size_on_disk, "Hugging Face Hub", path, complete, delete))
    return models


def _delete_revision(commit: str, progress: Progress) -> None:
    from huggingface_hub import scan_cache_dir

    strategy = scan_cache_dir().delete_revisions(commit)
    progress(f"deleting {strategy.expected_freed_size} bytes", 0, 1)
    strategy.execute()
    progress(f"deleting {strategy.expected_freed_size} bytes", 1, 1)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
