"""The disk index while other processes remove files and the directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.kv.store.tiers.disk.disk_index import scan
from stoker.kv.store.tiers.disk.disk_journal import DiskJournal, JournalChange


def test_only_a_block_removed_during_the_scan_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("00" * 8) / "0" / "0"
    folder.mkdir(parents=True)
    for number in range(20):
        (folder / f"00{number:030x}.kv").write_bytes(b"block")
    real_scandir = os.scandir

    @contextmanager
    def scandir(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with real_scandir(path) as entries:
            listed = list(entries)
        os.unlink(listed[3].path)  # by another worker's eviction
        yield iter(listed)

    monkeypatch.setattr(os, "scandir", scandir)
    assert sum(len(found) for found in scan(tmp_path)) == 19


@pytest.mark.parametrize("does", ["read", "append"])
def test_a_journal_that_cannot_be_reopened_does_not_touch_other_files(tmp_path: Path, does: str) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    journal, other = DiskJournal(root / "journal"), DiskJournal(root / "journal")
    change = JournalChange(b"a" * 24, 1, True)
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError):
        journal.read_changes() if does == "read" else journal.append([change])
    unrelated = os.memfd_create("unrelated")  # gets the lowest free descriptor number
    root.mkdir()
    other.append([change])
    journal.append([])
    assert set(journal.read_changes()) == {change}  # in the old file too
    os.fstat(unrelated)
    assert os.pread(unrelated, 1000, 0) == b""
    os.close(unrelated)
    journal.close()
    other.close()
