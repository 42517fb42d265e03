"""What a process believes to lie in the disk tier's directory, while others remove files, and the directory, under it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.kv.store.tiers.disk.disk_index import scan
from stoker.kv.store.tiers.disk.disk_journal import DiskJournal, JournalChange


def test_a_block_that_goes_during_the_scan_is_the_only_one_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("00" * 8) / "0" / "0"
    folder.mkdir(parents=True)
    for number in range(20):
        (folder / f"00{number:030x}.kv").write_bytes(b"block")
    real_scandir = os.scandir

    @contextmanager
    def scandir(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with real_scandir(path) as entries:
            listed = list(entries)
        os.unlink(listed[3].path)  # by another worker, which makes room
        yield iter(listed)

    monkeypatch.setattr(os, "scandir", scandir)
    assert sum(len(found) for found in scan(tmp_path)) == 19


@pytest.mark.parametrize("does", ["read", "append"])
def test_a_journal_that_cannot_be_opened_again_leaves_the_files_of_others_alone(tmp_path: Path, does: str) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    journal, other = DiskJournal(root / "journal"), DiskJournal(root / "journal")
    change = JournalChange(b"a" * 24, 1, True)
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError):
        journal.read_changes() if does == "read" else journal.append([change])
    somebodys = os.memfd_create("somebody's")  # gets the lowest number that is free
    root.mkdir()
    other.append([change])
    journal.append([])
    assert set(journal.read_changes()) == {change}  # in the old one, too
    os.fstat(somebodys)
    assert os.pread(somebodys, 1000, 0) == b""
    os.close(somebodys)
    journal.close()
    other.close()
