"""A cache folder is complete or absent, also after kills, full disks and concurrent builders."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tiny_gguf import TinyGguf

from stoker.base.errors import ModelFilesError
from stoker.checkpoint import cache, gguf_folder, gguf_weights
from stoker.checkpoint.progress import silent
from stoker.checkpoint.source import resolve_model

KILLED_AT_THE_FIFTH_TENSOR = """
import os, signal, sys
from pathlib import Path
from stoker.checkpoint.source import resolve_model

def progress(stage, done, total):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)

resolve_model(sys.argv[1], Path(sys.argv[2]), progress)
"""

SLOW = """
import sys, time
from pathlib import Path
from stoker.checkpoint.source import resolve_model

def progress(stage, done, total):
    if stage.startswith("converting"):
        if done == 0:
            print("converted", flush=True)
        time.sleep(0.03)

print(resolve_model(sys.argv[1], Path(sys.argv[2]), progress).path, flush=True)
"""


def start(program: str, path: Path, cache_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, str(path), str(cache_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def left_in(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models").iterdir() if path.suffix != ".lock")


def test_the_second_call_finds_the_folder_without_work(gguf_path: Path, cache_dir: Path) -> None:
    TinyGguf().write(gguf_path)
    stages: list[str] = []
    first = resolve_model(str(gguf_path), cache_dir, lambda stage, done, total: stages.append(stage))
    assert stages
    stages.clear()
    assert resolve_model(str(gguf_path), cache_dir, lambda stage, done, total: stages.append(stage)) == first
    assert stages == []
    assert first.name == "tiny"
    assert first.path.parent == cache_dir / "models"


def test_a_changed_file_is_converted_again(gguf_path: Path, cache_dir: Path) -> None:
    TinyGguf().write(gguf_path)
    first = resolve_model(str(gguf_path), cache_dir, silent)
    TinyGguf(tied=False).write(gguf_path)
    second = resolve_model(str(gguf_path), cache_dir, silent)
    assert first.path != second.path
    assert "lm_head.weight" in load_file(second.path / "model.safetensors")


@pytest.mark.parametrize("damage", ["another version", "a lost file", "a short file", "no marker"])
def test_an_incomplete_folder_is_built_again(
    damage: str, gguf_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = TinyGguf().write(gguf_path)
    folder = resolve_model(str(gguf_path), cache_dir, silent).path
    if damage == "another version":
        monkeypatch.setattr("stoker.checkpoint.source.FORMAT_VERSION", gguf_folder.FORMAT_VERSION + 1)
        (folder / "of the old version").touch()
    elif damage == "a lost file":
        (folder / "tokenizer.json").unlink()
    elif damage == "a short file":
        os.truncate(folder / "model.safetensors", 1000)
    else:
        (folder / cache.MARKER).unlink()
    assert resolve_model(str(gguf_path), cache_dir, silent).path == folder
    assert load_file(folder / "model.safetensors").keys() == expected.keys()
    assert (folder / "tokenizer.json").exists()
    assert not (folder / "of the old version").exists()
    assert left_in(cache_dir) == [folder.name]


def test_a_killed_conversion_leaves_no_model_folder(gguf_path: Path, cache_dir: Path) -> None:
    expected = TinyGguf().write(gguf_path)
    killed = start(KILLED_AT_THE_FIFTH_TENSOR, gguf_path, cache_dir)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert [name for name in left_in(cache_dir) if name.endswith(".tmp")] == left_in(cache_dir) != []
    folder = resolve_model(str(gguf_path), cache_dir, silent).path
    assert load_file(folder / "model.safetensors").keys() == expected.keys()
    assert left_in(cache_dir) == [folder.name]


def test_two_processes_at_once_convert_once(gguf_path: Path, cache_dir: Path) -> None:
    TinyGguf().write(gguf_path)
    both = [start(SLOW, gguf_path, cache_dir) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(len(words) for words in said) == [1, 2]
    assert said[0][-1] == said[1][-1] == str(resolve_model(str(gguf_path), cache_dir, silent).path)


def test_too_little_space_is_reported_before_anything_is_written(
    gguf_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TinyGguf().write(gguf_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5))  # type: ignore[attr-defined]
    with pytest.raises(ModelFilesError, match=r"\d{6} bytes are needed and 5 are free"):
        resolve_model(str(gguf_path), cache_dir, silent)
    assert left_in(cache_dir) == []


def test_a_disk_that_fills_up_during_a_conversion_leaves_nothing(
    gguf_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TinyGguf().write(gguf_path)

    def write(out: FileIO, data: bytes) -> None:
        if out.tell() > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        out.write(data)

    monkeypatch.setattr(gguf_weights, "write", write)
    with pytest.raises(ModelFilesError, match="bytes are needed and"):
        resolve_model(str(gguf_path), cache_dir, silent)
    assert left_in(cache_dir) == []


def test_a_disk_that_is_really_full_leaves_nothing(
    gguf_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TinyGguf().write(gguf_path)
    monkeypatch.setattr(gguf_folder, "require_space", lambda folder, needed_bytes: None)
    with pytest.raises(ModelFilesError, match=r"\d{6} bytes are needed and \d+ are free"):
        resolve_model(str(gguf_path), small_disk, silent)
    assert left_in(small_disk) == []


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    class Reluctant(FileIO):
        def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
            return super().write(data[:3])

    with Reluctant(tmp_path / "out", "wb") as out:
        gguf_weights.write(out, memoryview(b"0123456789"))
    assert (tmp_path / "out").read_bytes() == b"0123456789"


def test_a_cache_that_is_a_file_is_named(gguf_path: Path, tmp_path: Path) -> None:
    TinyGguf().write(gguf_path)
    (tmp_path / "occupied").touch()
    with pytest.raises(ModelFilesError, match=r"occupied.*STOKER_CACHE"):
        resolve_model(str(gguf_path), tmp_path / "occupied", silent)


def test_a_lock_that_is_never_released_is_named(
    gguf_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_DEADLINE_S", 0.2)
    cache_dir.mkdir()
    lock = cache_dir / "x.lock"
    with cache.locked(lock, silent), pytest.raises(ModelFilesError, match=r"x\.lock"), cache.locked(lock, silent):
        pass
