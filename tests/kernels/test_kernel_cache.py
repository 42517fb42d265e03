"""No fault of the kernel cache or of an archive stops a start: what cannot be read is missing, what cannot be written goes
elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.kernels.compiled.kernel_archive import (
    SHIPPED_FOLDER,
    KernelArchive,
    Manifest,
    hash_of_sources,
    write_archive,
)
from stoker.kernels.compiled.kernel_cache import KernelCache, name_in_archive

KEY, KERNEL = "ABCDEF", "_attend.json"
FILES = {KERNEL: b'{"shared": 1}', "_attend.cubin": bytes(range(256)) * 40}


class Faults(list[str]):
    """Collects what a cache warns of."""

    def __call__(self, what: str, where: Path, why: str) -> None:
        self.append(what)


@pytest.fixture
def faults() -> Faults:
    return Faults()


def fill(cache: KernelCache) -> None:
    for name, data in FILES.items():
        cache.put(KEY, name, data)
    cache.put(KEY, "_attend.source", b"intermediate")
    cache.put_group(KEY, KERNEL, [*FILES, "_attend.source"])


def found(cache: KernelCache) -> dict[str, bytes] | None:
    group = cache.find_group(KEY, KERNEL)
    return None if group is None else {name: Path(path).read_bytes() for name, path in group.items()}


def members(folder: Path) -> list[tuple[str, bytes]]:
    named = [(name_in_archive(path), path.read_bytes()) for path in folder.glob("*/*")]
    return [(name, data) for name, data in named if name is not None]


@pytest.fixture
def archive(tmp_path: Path, faults: Faults) -> Path:
    fill(KernelCache(tmp_path / "source", [], faults))
    path = tmp_path / "kernels.zip"
    write_archive(path, Manifest(90, "3.6.0", "0" * 16, ["a model"]), members(tmp_path / "source"))
    return path


def test_a_kernel_is_found_by_the_next_process(tmp_path: Path, faults: Faults) -> None:
    fill(KernelCache(tmp_path, [], faults))
    cache = KernelCache(tmp_path, [], faults)
    assert found(cache) == FILES
    assert (cache.counts.from_folder, cache.counts.from_archive, cache.counts.compiled) == (1, 0, 0)
    assert cache.find(KEY, "other.json") is None
    assert cache.find("OTHER", KERNEL) is None
    assert faults == []


@pytest.mark.parametrize("cut", [0, 1, 5000])
def test_a_truncated_file_is_missing_and_is_replaced(tmp_path: Path, faults: Faults, cut: int) -> None:
    fill(KernelCache(tmp_path, [], faults))
    [cubin] = tmp_path.glob(f"{KEY}/*.cubin")
    cubin.write_bytes(cubin.read_bytes()[:cut])
    cache = KernelCache(tmp_path, [], faults)
    assert found(cache) is None
    assert found(cache) is None
    assert faults == ["kernel_cache_corrupt"]  # once
    fill(cache)
    assert found(cache) == FILES


def test_a_list_of_files_that_is_no_json_is_missing(tmp_path: Path, faults: Faults) -> None:
    fill(KernelCache(tmp_path, [], faults))
    [listed] = tmp_path.glob(f"{KEY}/*__group__*")
    listed.write_bytes(b"[")
    assert found(KernelCache(tmp_path, [], faults)) is None


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(tmp_path: Path, faults: Faults) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = KernelCache(blocked / "kernels", [], faults)
    assert found(cache) is None
    fill(cache)
    assert found(cache) == FILES
    assert faults == ["kernel_cache_unwritable"]
    assert blocked.read_text() == "not a folder"


def test_an_archive_fills_the_folder(tmp_path: Path, archive: Path, faults: Faults) -> None:
    folder = tmp_path / "folder"
    cache = KernelCache(folder, [KernelArchive(archive)], faults)
    assert found(cache) == FILES
    assert (cache.counts.from_folder, cache.counts.from_archive) == (0, 1)
    archive.unlink()
    assert found(KernelCache(folder, [], faults)) == FILES
    assert faults == []


def test_an_archive_works_without_a_folder_that_can_be_written(tmp_path: Path, archive: Path, faults: Faults) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert found(KernelCache(blocked / "kernels", [KernelArchive(archive)], faults)) == FILES


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "folder", "truncated", "flipped"])
def test_a_damaged_archive_is_left_out_with_one_warning(
    tmp_path: Path, archive: Path, faults: Faults, damage: str
) -> None:
    data = bytearray(archive.read_bytes())
    archive.unlink()
    if damage == "folder":
        archive.mkdir()
    elif damage != "missing":
        middle = data.index(b"_attend.cubin") + 200
        flipped = (
            bytes(data[:middle]) + bytes(255 - byte for byte in data[middle : middle + 8]) + bytes(data[middle + 8 :])
        )
        damaged = {"empty": b"", "text": b"no zip file", "truncated": bytes(data[: len(data) // 2]), "flipped": flipped}
        archive.write_bytes(damaged[damage])
    cache = KernelCache(tmp_path / "folder", [KernelArchive(archive)], faults)
    assert found(cache) is None
    assert found(cache) is None
    assert faults == ["kernel_archive_unreadable"]


def test_packing_the_same_kernels_gives_the_same_file(tmp_path: Path, archive: Path) -> None:
    before = archive.read_bytes()
    write_archive(archive, Manifest(90, "3.6.0", "0" * 16, ["a model"]), reversed(members(tmp_path / "source")))
    assert archive.read_bytes() == before
    assert not any(b"intermediate" in data for _name, data in members(tmp_path / "source"))


def test_the_archives_that_come_with_stoker_are_readable() -> None:
    for path in SHIPPED_FOLDER.glob("*.zip"):
        archive = KernelArchive(path)
        manifest = archive.manifest
        assert path.name == f"triton-{manifest.triton}-sm{manifest.arch}.zip"
        assert archive.num_kernels > 0
        if manifest.sources != hash_of_sources():  # workers compile again, so that a change of a kernel need not wait
            print(f"{path.name} is stale: run scripts/ship-kernels")
