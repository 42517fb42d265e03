"""The file of tuned tiles: written completely or not at all, and never a reason for a start to fail."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.base.errors import ConfigError
from stoker.engine import tuning_file
from stoker.engine.tuning_file import TuningSystem, UnusableTuning, load_tuning, read_tuning, tuning_path, write_tuning
from stoker.kernels.tile_choice import KERNEL, numbers_of, row_class, skinny_tile
from stoker.kernels.tile_profiles import WEIGHT_BYTES
from stoker.kernels.tuned_tiles import TileKey, use_tuned_tiles

SYSTEM = TuningSystem("NVIDIA H200", "0123456789abcdef", "2.11.0", "3.6.0")
SHAPE = (4096, 4096)
KEY = TileKey(KERNEL, "int4", 16, *SHAPE)
LIBRARY = TileKey(KERNEL, "bf16", 64, *SHAPE)
# Not what the model predicts, so that its use can be seen.
TILE = numbers_of(row_class("int4", 16).candidates(*SHAPE, WEIGHT_BYTES["int4"])[3][1])


@pytest.fixture(autouse=True)
def no_tuned_tiles():
    yield
    use_tuned_tiles({})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tuning_path(tmp_path / "tuning", SYSTEM)
    write_tuning(found, SYSTEM, {KEY: TILE, LIBRARY: ()})
    return found


def load(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Load the file as an engine does, and return the warnings."""
    monkeypatch.setattr(TuningSystem, "of", lambda device: SYSTEM)
    caplog.clear()
    logging.getLogger("stoker").propagate = True
    load_tuning(path.parent, torch.device("cpu"))
    return [record.fields["reason"] for record in caplog.records if record.levelno == logging.WARNING]


def test_an_engine_uses_what_was_written(path, monkeypatch, caplog):
    assert path.name == "NVIDIA-H200.json"
    assert read_tuning(path, SYSTEM) == {KEY: TILE, LIBRARY: ()}
    assert numbers_of(skinny_tile("int4", 8, *SHAPE)) != TILE
    assert load(path, monkeypatch, caplog) == []
    assert numbers_of(skinny_tile("int4", 8, *SHAPE)) == TILE
    assert os.listdir(path.parent) == [path.name]  # no temporary file is left


def test_no_file_is_no_problem(tmp_path, monkeypatch, caplog):
    assert load(tmp_path / "none" / "x.json", monkeypatch, caplog) == []


@pytest.mark.parametrize("field", ["gpu", "kernels", "torch_version", "triton_version", "format"])
def test_a_file_of_another_system_is_ignored_with_one_warning(path, field, monkeypatch, caplog):
    write_tuning(path, replace(SYSTEM, **{field: "other"}), {KEY: TILE})
    [reason] = load(path, monkeypatch, caplog)
    assert field in reason
    assert "'other'" in reason
    assert numbers_of(skinny_tile("int4", 8, *SHAPE)) != TILE


def test_files_for_other_gpus_only_are_worth_one_warning(path, monkeypatch, caplog):
    path.rename(path.with_name("NVIDIA-H100-80GB-HBM3.json"))
    [reason] = load(path, monkeypatch, caplog)
    assert "NVIDIA-H100-80GB-HBM3.json" in reason
    assert "NVIDIA H200" in reason


def damaged_files() -> dict[str, bytes]:
    good = {
        "gpu": SYSTEM.gpu,
        "kernels": SYSTEM.kernels,
        "torch_version": "2.11.0",
        "triton_version": "3.6.0",
        "format": 1,
    }
    tile = {"kernel": KERNEL, "kind": "int4", "rows": 16, "outs": 4096, "ins": 4096, "experts": 0, "top_k": 0}
    entries = {
        "a tile that the kernel cannot run": tile | {"tile": [4096, 256, 4, 3, 1, 0]},
        "too few numbers": tile | {"tile": [128]},
        "text for a number": tile | {"tile": list(TILE), "outs": "4096"},
        "a boolean for a number": tile | {"tile": [True, *TILE[1:]]},
        "a negative size": tile | {"tile": list(TILE), "ins": -4096},
        "no inputs": tile | {"tile": list(TILE), "ins": 0},
        "an unknown kernel": tile | {"tile": list(TILE), "kernel": "unknown"},
        "an unknown kind": tile | {"tile": list(TILE), "kind": "int3"},
        "a kind that is a list": tile | {"tile": list(TILE), "kind": ["int4"]},
        "rows of no class": tile | {"tile": list(TILE), "rows": 17},
        "an unknown field": tile | {"tile": list(TILE), "more": 1},
        "no tile": tile,
        "a library for quantised weights": tile | {"tile": []},
        "not an object": 7,
    }
    found = {name: json.dumps(good | {"tiles": [entry]}).encode() for name, entry in entries.items()}
    whole = json.dumps(good | {"tiles": [tile | {"tile": list(TILE)}]}).encode()
    return found | {
        "empty": b"",
        "truncated": whole[:-20],
        "not text": bytes(range(256)),
        "a list": b"[]",
        "no tiles": json.dumps(good).encode(),
        "nested deeply": b"[" * 200_000,
    }


@pytest.mark.parametrize("name", damaged_files())
def test_a_damaged_file_is_ignored_with_one_warning(path, name, monkeypatch, caplog):
    path.write_bytes(damaged_files()[name])
    [reason] = load(path, monkeypatch, caplog)
    assert "damaged" in reason
    assert numbers_of(skinny_tile("int4", 8, *SHAPE)) != TILE


def test_something_else_in_place_of_the_file_is_ignored(path, monkeypatch, caplog):
    path.unlink()
    os.mkfifo(path)
    assert load(path, monkeypatch, caplog) == ["it is not a file"]


def test_a_path_that_the_system_refuses_is_unusable(tmp_path):
    with pytest.raises(UnusableTuning, match="it cannot be read: File name too long"):
        read_tuning(tmp_path / ("a" * 300) / "x.json", SYSTEM)


def test_an_unwritable_folder_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "tuning").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match=r"tuning/NVIDIA-H200\.json cannot be written: .*--cache-dir"):
        write_tuning(tuning_path(tmp_path / "tuning", SYSTEM), SYSTEM, {})


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning_file.os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_tuning(path, SYSTEM, {})
    assert read_tuning(path, SYSTEM) == {KEY: TILE, LIBRARY: ()}
    assert os.listdir(path.parent) == [path.name]


def test_an_unusable_file_says_which_version_it_has(path):
    with pytest.raises(UnusableTuning, match=r"made with torch_version '2\.11\.0', and this is '2\.12\.0'"):
        read_tuning(path, replace(SYSTEM, torch_version="2.12.0"))
