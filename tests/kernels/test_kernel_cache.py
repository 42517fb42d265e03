"""No fault of the kernel cache or of an archive stops a start: what cannot be read is missing, what cannot be written goes
elsewhere."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from stoker.kernels.compiled import kernel_archive
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


def test_the_hash_follows_the_source_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_archive, "_KERNELS_FOLDER", tmp_path)
    (tmp_path / "one.py").write_text("a = 1")
    before = hash_of_sources()
    (tmp_path / "one.py").write_text("a = 2")
    assert hash_of_sources() != before


# ---- hostile files and folders

LISTS = [
    b"{",
    b"7",
    b"\xff",
    b'{"a": 1}',
    b"[1]",
    b'["../../x"]',
    b'["a\\u0000"]',
    b'["' + b"a" * 300 + b'"]',
    b"[" * 100_000,
]


@pytest.mark.parametrize("data", LISTS, ids=range(len(LISTS)))
def test_a_hostile_list_of_files_is_missing(tmp_path: Path, faults: Faults, data: bytes) -> None:
    path = tmp_path / "hostile.zip"
    names = [f"__group__{KERNEL}", "../../x", "a\0", "a" * 300]
    write_archive(path, Manifest(90, "3.6.0", "0", []), [(f"{KEY}/{name}", data) for name in names])
    cache = KernelCache(tmp_path / "cache", [KernelArchive(path)], faults)
    assert found(cache) is None
    assert faults == ["kernel_cache_corrupt"]
    assert len(list((tmp_path / "cache").glob("**/*.*"))) == 1  # the list itself


def test_a_folder_that_all_users_can_write_to_is_not_used(tmp_path: Path, faults: Faults) -> None:
    fill(KernelCache(tmp_path / "cache", [], faults))
    (tmp_path / "cache").chmod(0o777)
    cache = KernelCache(tmp_path / "cache", [], faults)
    assert found(cache) is None
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert faults == ["kernel_cache_not_trusted"]
    fill(cache)
    assert found(cache) == FILES


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(KernelCache(tmp_path, [], faults))
    os.chown(tmp_path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert found(KernelCache(tmp_path, [], faults)) is None
    assert faults == ["kernel_cache_not_trusted"]


def test_new_folders_are_not_writable_by_others(tmp_path: Path, faults: Faults) -> None:
    before = os.umask(0)
    try:
        fill(KernelCache(tmp_path / "cache", [], faults))
    finally:
        os.umask(before)
    assert found(KernelCache(tmp_path / "cache", [], faults)) == FILES
    assert faults == []


def test_a_member_that_expands_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.zip"
    write_archive(path, Manifest(90, "3.6.0", "0", []), [("KEY/bomb", bytes(100_001))])
    assert path.stat().st_size < 2000
    monkeypatch.setattr(kernel_archive, "_MAX_MEMBER_BYTES", 100_000)
    with pytest.raises(ValueError, match="the limit is 100000"):
        KernelArchive(path).read("KEY/bomb")


MANIFESTS = [b"7", b"[" * 100_000, b'{"arch": 90, "triton": "3", "sources": "0", "models": null}']
MANIFESTS += [b'{"arch": "90", "triton": "3", "sources": "0", "models": []}']
MANIFESTS += [b'{"arch": 90, "triton": "3", "sources": "0", "models": ["\\u001b[2J"]}']


@pytest.mark.parametrize("data", MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_hostile_manifest_is_an_error_that_the_command_reports(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "hostile.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", data)
    with pytest.raises(ValueError, match="manifest"):
        _ = KernelArchive(path).manifest


def test_writing_follows_no_link_and_leaves_nothing_behind(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "kernels.zip"
    victim.write_text("kept")
    for name in ("kernels.zip", "kernels.zip.new"):
        (tmp_path / name).symlink_to(victim)
    manifest = Manifest(90, "3.6.0", "0", [])
    write_archive(path, manifest, [])
    assert victim.read_text() == "kept"
    assert KernelArchive(path).manifest == manifest
    with pytest.raises(TypeError):
        write_archive(path, manifest, [("a", None)])  # type: ignore[list-item]
    assert sorted(os.listdir(tmp_path)) == ["kernels.zip", "kernels.zip.new", "victim"]
