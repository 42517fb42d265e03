"""Bytes of safetensors files end up in their tensors, for any cuts, dtypes and offsets; broken files are named."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker.base.errors import ModelFilesError
from stoker.checkpoint import weight_files as files
from stoker.checkpoint.weight_files import (
    BLOCK_BYTES,
    WeightReadAhead,
    is_cached,
    read_bytes,
    read_header,
    stored_tensors,
    weight_files,
)
from stoker.models.fill import Copy, fill


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (3, 5), "b": (1000, 7), "c": (1,), "d": (4096, 3), "e": (2, 2, 2)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def quiet(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_bytes", [4096, 12288, 8 << 20])
@pytest.mark.parametrize("where", ["cached", "on the drive", "read ahead", "partly read ahead"])
def test_every_value_finds_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_bytes: int, where: str
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    values = tensors()
    file = tmp_path / "model.safetensors"
    save_file(values, file)
    if where != "cached":
        monkeypatch.setattr(files, "_is_resident", lambda fd, offset, length: False)
    ahead = WeightReadAhead([file], {"read ahead": 1 << 30, "partly read ahead": 20000}.get(where, 0))
    stored = stored_tensors(tmp_path)
    places = {name: torch.full(value.shape, float("nan"), dtype=dtype) for name, value in values.items()}
    seen = []
    copies = [Copy.of(stored[name], place) for name, place in places.items()]
    fill(copies, lambda done, total: seen.append((done, total)), ahead)
    for name, value in values.items():
        assert torch.equal(places[name], value.to(dtype)), name
    assert seen[-1] == (sum(value.nbytes for value in values.values()),) * 2


def test_unaligned_values_are_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format promises no alignment: here everything begins at an odd byte."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 4096)
    values = torch.randn(5000)
    header = json.dumps({"w": {"dtype": "F32", "shape": [5000], "data_offsets": [0, 20000]}})
    header += " " * (1 - len(header) % 2)
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header.encode() + values.numpy().tobytes()
    )
    place = torch.zeros(5000, dtype=torch.float64)
    fill([Copy.of(stored_tensors(tmp_path)["w"], place)], quiet)
    assert torch.equal(place, values.double())


def test_a_file_that_ends_early_is_named_before_anything_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    whole = file.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelFilesError, match=r"model\.safetensors is not a complete safetensors file"):
            read_header(file)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    stored = stored_tensors(tmp_path)["d"]
    file.write_bytes(file.read_bytes()[: stored.offset + 10])
    with pytest.raises(ModelFilesError, match=r"model\.safetensors ends at byte"):
        fill([Copy.of(stored, torch.empty(stored.shape, dtype=torch.bfloat16))], quiet)


@pytest.mark.parametrize("where", ["cached", "on the drive"])
def test_a_read_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)["d"]
    monkeypatch.setattr(files, "_is_resident", lambda fd, offset, length: where == "cached")

    def fail(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors cannot be read: Input/output error"):
        fill([Copy.of(stored, torch.empty(stored.shape, dtype=torch.bfloat16))], quiet)


def test_an_unreadable_file_is_not_reported_as_broken(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelFilesError, match=r"model\.safetensors cannot be read: Is a directory"):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}, "F99"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "8 bytes for F32"),
        ({"dtype": "F32", "data_offsets": [0, 8]}, "shape"),
    ],
)
def test_an_invalid_tensor_is_named(tmp_path: Path, entry: dict[str, object], said: str) -> None:
    header = json.dumps({"w": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelFilesError, match="the header of tensor 'w' is invalid") as refused:
        read_header(file)
    assert said in refused.value.message


def test_reading_ahead_ignores_missing_files(tmp_path: Path) -> None:
    ahead = WeightReadAhead([tmp_path / "gone"], 1 << 30)
    assert ahead.take(tmp_path / "gone", 0) is None


def test_a_block_is_read_ahead_or_by_its_first_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(files, "_is_resident", lambda fd, offset, length: False)
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(40 * 4096 + 77))
    ahead = WeightReadAhead([file], 1 << 30)
    for number in range(41):
        block = ahead.take(file, number)
        if block is not None:
            assert bytes(block) == file.read_bytes()[number * 4096 : (number + 1) * 4096]
        assert ahead.take(file, number) is None


def test_only_the_files_of_the_index_are_read_ahead(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same once more")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}})
    )
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    index.write_text("[]")
    assert weight_files(tmp_path) == []


def test_a_file_is_the_same_by_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_is_resident", lambda fd, offset, length: False)
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    ahead = WeightReadAhead([tmp_path / "link"], 1 << 30)
    while not ahead._read:
        pass
    block = ahead.take(tmp_path / "file", 0)
    assert block is not None
    assert bytes(block) == b"bytes"


def on_the_drive(file: Path) -> bool:
    """Return True if the file could be dropped from the page cache; a file system in memory cannot do that."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return not is_cached(file, 0)


def test_cached_blocks_are_known_and_the_check_reads_nothing(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(3 * BLOCK_BYTES + 5))
    numbers = range(4)
    assert all(is_cached(file, number) for number in numbers)
    if not on_the_drive(file):
        pytest.skip("this file system keeps its files in memory")
    for _ in range(3):
        assert not any(is_cached(file, number) for number in numbers)
        time.sleep(0.05)  # for what the kernel might read ahead by itself


def test_reading_past_the_cache_leaves_nothing_there(tmp_path: Path) -> None:
    file, content = tmp_path / "weights", os.urandom(2 * BLOCK_BYTES + 4097)
    file.write_bytes(content)
    if not on_the_drive(file):
        pytest.skip("this file system keeps its files in memory")
    into = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    for number in range(3):
        got = read_bytes(file, number * BLOCK_BYTES, into)
        assert bytes(into[:got]) == content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
    assert not is_cached(file, 0)
    assert not is_cached(file, 1)


def test_heads_are_in_memory_before_the_drive_is_busy(tmp_path: Path) -> None:
    """The server reads the headers while the engine reads ahead. With 16 files, that once took 19 s."""
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:  # nearly all of the file is header, so that it counts as cached
        head_bytes = BLOCK_BYTES - 2000
        file.write_bytes(struct.pack("<Q", head_bytes) + os.urandom(BLOCK_BYTES))
    if not all(on_the_drive(file) for file in files):
        pytest.skip("this file system keeps its files in memory")
    WeightReadAhead(files, 0).close()
    assert all(is_cached(file, 0) for file in files)
