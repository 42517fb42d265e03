"""The disk tier: restarts, damaged files, full and failing disks, other workers, and encryption."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tier_writes import put

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.store.tiers.disk import disk_contents, disk_index, disk_journal
from stoker.kv.store.tiers.disk import disk_directory as disk_dir
from stoker.kv.store.tiers.disk import disk_tier as disk_module
from stoker.kv.store.tiers.disk.block_file import BlockFiles
from stoker.kv.store.tiers.disk.disk_encryption import Cipher, read_key
from stoker.kv.store.tiers.disk.disk_journal import DiskJournal, JournalChange
from stoker.kv.store.tiers.disk.disk_tier import DiskTier, disk_tier
from stoker.kv.store.tiers.process_liveness import started_at
from stoker.kv.store.tiers.tier import HostBytes, TierContext

LAYOUT = KvLayout.of(num_layers=2, num_heads=2, width=64, block_tokens=64, dtype="float32", dtype_bytes=4)
ODD = KvLayout.of(num_layers=1, num_heads=3, width=40, block_tokens=10, dtype="float32", dtype_bytes=4)
BLOCK = LAYOUT.block_bytes
FILE = BLOCK + 4096
KEY = bytes(range(32))


class Made:
    """Makes tiers of one directory, and closes them at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lost: list[BlockKey] = []
        self._tiers: list[DiskTier] = []

    def __call__(
        self,
        blocks: int = 100,
        layout: KvLayout = LAYOUT,
        key: bytes | None = None,
        fingerprint: str = "f",
        scanned: bool = True,
        direct: bool = True,
    ) -> DiskTier:
        context = TierContext(fingerprint, layout, self.lost.extend)
        size = blocks * (
            layout.block_bytes + 8192 if key else FILE if layout is LAYOUT else 2 * 4096 + layout.block_bytes
        )
        tier = DiskTier(self.root, size, context, Cipher(key) if key else None, direct_reads=direct)
        self._tiers.append(tier)
        if scanned:
            assert tier._contents.scanned.wait(30)
        return tier

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()


class Clock:
    """The clock of the pauses, so that a delayed test is still within a pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(disk_dir, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=time.time))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the disk answers in time."""
    monkeypatch.setattr(disk_module, "_LOOKUP_S", 60.0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path / "kv")
    yield made
    made.close()


def name_of(number: int, tokens: int = 64) -> BlockName:
    key = BlockKey(np.random.default_rng(number).bytes(16))
    return BlockName(key, BlockKey(bytes(16)), tuple(range(number, number + tokens)), "salt" if number == 0 else None)


def data_of(number: int, size: int = BLOCK) -> HostBytes:
    return np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)


def write(tier: DiskTier, *numbers: int) -> list[bool]:
    return put(tier, [name_of(number) for number in numbers], [data_of(number) for number in numbers])


def read(tier: DiskTier, *numbers: int) -> list[bool]:
    into = [np.empty(BLOCK, dtype=np.uint8) for _ in numbers]
    had = tier.read([name_of(number).key for number in numbers], into)
    assert all(np.array_equal(data, data_of(number)) for data, number, ok in zip(into, numbers, had, strict=True) if ok)
    return had


def find(tier: DiskTier, *numbers: int) -> list[bool]:
    return tier.find([name_of(number).key for number in numbers])


def path_of(root: Path, number: int) -> Path:
    (path,) = root.rglob(f"{name_of(number).key.hex()}.kv")
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_restart_keeps_every_block(make: Made, key: bytes | None) -> None:
    tier = make(key=key)
    write(tier, *range(50))
    tier.close()
    again = make(key=key, scanned=False)
    assert find(again, *range(50)) == [True] * 50  # whether or not the scan has reached them
    assert again._contents.scanned.wait(30)
    assert read(again, *range(50)) == [True] * 50
    assert again.stats().blocks == 50
    names = {name.key: name for name in again.names()}
    assert names == {name_of(number).key: name_of(number) for number in range(50)}


def test_the_order_of_last_use_survives_a_restart(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_NOTE_USE_NS", 0)
    tier = make(blocks=10)
    for number in range(10):
        write(tier, number)
    read(tier, 0, 1, 2)
    tier.close()
    again = make(blocks=10)
    write(again, 20, 21)
    assert find(again, *range(10)) == [True] * 3 + [False] * 2 + [True] * 5
    assert make.lost == [name_of(3).key, name_of(4).key]


def test_a_smaller_size_takes_effect_at_the_start(make: Made) -> None:
    tier = make(blocks=20)
    for number in range(20):
        write(tier, number)
    tier.close()
    smaller = make(blocks=5)
    until_s = time.monotonic() + 60
    while smaller.stats().used_bytes > smaller.stats().capacity_bytes and time.monotonic() < until_s:
        time.sleep(0.01)
    assert find(smaller, *range(20)) == [False] * 15 + [True] * 5


def held_scans(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Scans find nothing before the event is set."""
    may_go_on = threading.Event()
    real = disk_index.scan

    def slow(root: Path) -> Iterator[dict[bytes, disk_index.FileEntry]]:
        may_go_on.wait(60)
        yield from real(root)

    monkeypatch.setattr(disk_contents, "scan", slow)
    return may_go_on


def test_a_start_does_not_wait_for_the_scan(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make()
    write(tier, *range(10))
    tier.close()
    may_go_on = held_scans(monkeypatch)
    again = make(scanned=False)
    assert find(again, 0, 99) == [True, False]
    assert read(again, 0, 99) == [True, False]
    assert write(again, 50) == [True]
    may_go_on.set()
    assert again._contents.scanned.wait(30)
    assert again.stats().blocks == 11
    assert again.stats().used_bytes == 11 * FILE


def test_blocks_found_by_a_long_scan_are_listed(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make()
    write(tier, *range(10))
    tier.close()
    may_go_on = held_scans(monkeypatch)
    again = make(scanned=False)
    listed: list[BlockName] = []
    listing = threading.Thread(target=lambda: listed.extend(again.names()))
    listing.start()
    listing.join(0.2)
    assert listing.is_alive(), "it waits, however long that takes: a million files are looked at for minutes"
    may_go_on.set()
    listing.join(60)
    assert {name.key for name in listed} == {name_of(number).key for number in range(10)}


DAMAGE: dict[str, Callable[[Path], object]] = {
    "bit of the block": lambda path: flip(path, 4096 + 1000),
    "last bit of the block": lambda path: flip(path, 4096 + BLOCK - 1),
    "bit of the key": lambda path: flip(path, 20),
    "bit of the token ids": lambda path: flip(path, 200),
    "truncated in the block": lambda path: os.truncate(path, 4096 + 10000),
    "truncated by a page": lambda path: os.truncate(path, FILE - 4096),
    "truncated in the head": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(FILE)),
}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_dropped_and_counted(make: Made, damage: str, key: bytes | None, direct: bool) -> None:
    tier = make(key=key, direct=direct)
    write(tier, 1, 2)
    path = path_of(make.root, 1)
    DAMAGE[damage](path)
    if key and damage == "bit of the token ids":
        # Head and block are encrypted separately: reading the block does not need the head, reading the name does.
        assert [name.key for name in tier.names()] == [name_of(2).key]
        return
    assert read(tier, 1, 2) == [False, True]
    assert not path.exists()
    assert find(tier, 1, 2) == [False, True]
    assert make.lost == [name_of(1).key]
    assert (tier.stats().corrupt, tier.stats().errors) == (1, 0)
    assert write(tier, 1) == [True]
    assert read(tier, 1) == [True]


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_two_swapped_files_are_both_dropped(make: Made, key: bytes | None) -> None:
    tier = make(key=key)
    write(tier, 1, 2)
    one, two = path_of(make.root, 1), path_of(make.root, 2)
    one.rename(make.root / "x")
    two.rename(one)
    (make.root / "x").rename(two)
    assert read(tier, 1, 2) == [False, False]
    assert tier.stats().corrupt == 2
    assert not one.exists()
    assert not two.exists()


def test_nothing_of_the_prompt_can_be_read_in_an_encrypted_directory(make: Made) -> None:
    tier = make(key=KEY)
    name = BlockName(BlockKey(b"k" * 16), BlockKey(b"p" * 16), tuple([0x41424344] * 64), "thesalt")
    data = np.frombuffer(b"secret bytes...." * (BLOCK // 16), dtype=np.uint8)
    assert put(tier, [name], [data]) == [True]
    assert put(tier, [replace(name, key=BlockKey(b"l" * 16))], [data]) == [True]
    raw = [path.read_bytes() for path in make.root.rglob("*.kv")]
    for one in raw:
        for secret in (b"secret", b"DCBA", b"p" * 16, b"thesalt"):
            assert secret not in one
    assert raw[0][4096:] != raw[1][4096:]  # each file has its own nonce
    assert next(tier.names()).token_ids == name.token_ids


def test_another_key_or_none_is_refused_at_the_start(make: Made) -> None:
    tier = make(key=KEY)
    write(tier, 1)
    with pytest.raises(ConfigError, match="encrypted with another key"):
        make(key=bytes(32))
    with pytest.raises(ConfigError, match=r"is encrypted: set store\.disk_key_file"):
        make()
    assert read(make(key=KEY), 1) == [True]


def test_a_key_for_a_plain_directory_is_refused(make: Made) -> None:
    write(make(), 1)
    with pytest.raises(ConfigError, match="not encrypted"):
        make(key=KEY)


def test_blocks_of_another_key_are_misses(make: Made) -> None:
    write(make(key=KEY), 1)
    (make.root / "store.json").unlink()
    other = make(key=bytes(32))
    assert read(other, 1) == [False]
    assert other.stats().corrupt == 1


def test_a_damaged_marker_says_what_to_do(make: Made) -> None:
    make().close()
    (make.root / "store.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        make()


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(KEY)
    assert read_key(path) == KEY
    path.write_text(KEY.hex() + "\n")
    assert read_key(path) == KEY
    path.write_text("short")
    with pytest.raises(ConfigError, match="holds 5 bytes: write 32 bytes or 64 hex digits") as refused:
        read_key(path)
    assert "short" not in str(refused.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "none")


def test_files_of_killed_writers_are_removed_and_those_of_living_ones_are_not(make: Made) -> None:
    make().close()
    parent = os.getppid()
    living = make.root / "tmp" / f"{parent}-{started_at(parent)}-x-1"
    dead = make.root / "tmp" / f"{parent}-{started_at(parent) + 1}-x-1"
    old = make.root / "tmp" / f"{parent}-{started_at(parent)}-x-2"
    for path in (living, dead, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    make()
    assert (living.exists(), dead.exists(), old.exists()) == (True, False, False)


def test_workers_that_share_a_directory_see_and_count_each_others_blocks(make: Made) -> None:
    one, two = make(blocks=20), make(blocks=20)
    write(one, *range(10))
    write(two, *range(10, 20))
    time.sleep(0.01)
    assert find(one, *range(20)) == find(two, *range(20)) == [True] * 20
    assert one.stats().used_bytes == two.stats().used_bytes == 20 * FILE
    assert read(one, *range(10, 20)) == [True] * 10
    write(two, *range(20, 25))  # the second tier has seen no use of ten of them
    assert len(list(make.root.rglob("*.kv"))) == 20
    time.sleep(0.01)
    assert sum(find(one, *range(25))) == sum(read(one, *range(25))) == 20
    assert make.lost.count(make.lost[0]) == 2  # both have reported it


def test_a_use_by_another_worker_counts(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_NOTE_USE_NS", 0)
    one, two = make(blocks=10), make(blocks=10)
    for number in range(10):
        write(one, number)
    time.sleep(0.01)
    assert read(two, 0) == [True]
    assert write(one, 20) == [True]
    assert find(one, 0, 1, 2) == [True, False, True]


def test_a_file_deleted_by_hand_is_a_miss(make: Made) -> None:
    tier = make()
    write(tier, 1, 2)
    path_of(make.root, 1).unlink()
    assert read(tier, 1, 2) == [False, True]
    assert make.lost == [name_of(1).key]
    assert tier.stats().corrupt == tier.stats().errors == 0
    shutil.rmtree(make.root)
    assert write(tier, 3) == [True]
    assert read(tier, 2, 3) == [False, True]


def test_a_block_removed_during_its_read_is_not_counted_twice(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make()
    write(tier, 1)
    real_read = BlockFiles.read

    def read_and_evict(files: BlockFiles, path: str, key: BlockKey, into: HostBytes, use_ns: int | None) -> None:
        real_read(files, path, key, into, use_ns)
        tier.drop([key])  # as another thread does when it evicts

    monkeypatch.setattr(BlockFiles, "read", read_and_evict)
    assert read(tier, 1) == [True]
    assert find(tier, 1) == [False]
    assert tier.stats().used_bytes == 0


def test_blocks_of_other_models_count_and_are_evicted_when_oldest(make: Made) -> None:
    old = make(blocks=10, fingerprint="old")
    write(old, *range(10))
    old.close()
    new = make(blocks=10, fingerprint="new")
    assert find(new, *range(10)) == [False] * 10
    assert write(new, 1, 2, 3) == [True] * 3
    assert len(list(make.root.rglob("*.kv"))) == 10
    assert make.lost == []  # blocks of another model


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_blocks_and_buffers_of_odd_sizes(
    make: Made, monkeypatch: pytest.MonkeyPatch, key: bytes | None, direct: bool
) -> None:
    monkeypatch.setattr(disk_module, "DIRECT_BYTES", 1)
    tier = make(layout=ODD, key=key, direct=direct)
    size = ODD.block_bytes
    assert size % 4096
    assert put(tier, [name_of(1, 10)], [data_of(1, size)]) == [True]
    into = np.empty(size + 3, dtype=np.uint8)[3:]
    assert tier.read([name_of(1).key], [into]) == [True]
    assert np.array_equal(into, data_of(1, size))


def test_a_file_system_without_direct_io_works(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_direct(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", no_direct)
    tier = make()
    assert write(tier, 1, 2) == [True, True]
    assert read(tier, 1, 2) == [True, True]
    assert tier.stats().errors == 0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiny"
    path.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "none", path], capture_output=True)
    if not done or done.returncode:
        pytest.skip("only root may mount a file system")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_declines_blocks_and_is_retried_later(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, clock = Made(tiny_disk / "kv"), Clock(monkeypatch)
    tier = make()
    had = write(tier, *range(10))
    assert had.count(True) >= 5
    assert had.count(False) >= 1
    assert tier.stats().errors >= 1
    assert list((tiny_disk / "kv" / "tmp").iterdir()) == []
    errors = tier.stats().errors
    assert write(tier, 11, 12) == [False, False]  # not even tried
    assert tier.stats().errors == errors
    assert read(tier, *range(10)) == had  # and reading continues
    tier.drop([name_of(number).key for number in range(5)])
    assert tier._health.full_backoff.left_s <= 1.0
    clock.now_s += tier._health.full_backoff.left_s
    assert write(tier, 11) == [True]
    assert read(tier, 11) == [True]
    make.close()


def test_a_disk_that_has_become_read_only_is_still_read(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(disk_module, "_NOTE_USE_NS", 0)
    tier = make(blocks=10)
    write(tier, *range(10))
    real = os.open

    def refuse(*args: object, **rest: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def open_only_to_read(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        return refuse() or 0 if flags & (os.O_WRONLY | os.O_RDWR) else real(path, flags, mode, **rest)

    with monkeypatch.context() as read_only:
        for call in ("utime", "unlink", "rename", "write"):
            read_only.setattr(os, call, refuse)
        read_only.setattr(os, "open", open_only_to_read)
        for number in range(20, 25):
            assert write(tier, number) == [False]  # with an eviction first
            assert read(tier, *range(10)) == [True] * 10
        assert tier.stats().errors == 1, "it was not tried again before its time"
    clock.now_s += tier._health.full_backoff.left_s
    assert write(tier, 20) == [True]


def test_a_failing_disk_is_paused_and_retried_later(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    tier = make()
    write(tier, *range(10))
    real = os.preadv

    def failing(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    assert read(tier, 0) == read(tier, 1) == [False]
    with pytest.raises(TierUnavailable, match="failed 3 times in a row"):
        read(tier, 2)
    assert tier.stats().errors == 3
    assert find(tier, 1) == [False]
    assert write(tier, 20) == [False]
    with pytest.raises(TierUnavailable):
        read(tier, 1)
    assert tier.stats().errors == 3  # not used
    monkeypatch.setattr(os, "preadv", real)
    clock.now_s += tier._health.error_backoff.left_s
    assert read(tier, *range(10)) == [True] * 10
    assert make.lost == []


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"store\.disk_dir"):
        Made(tmp_path / "file" / "kv")()
    with pytest.raises(ConfigError, match="smaller than one block"):
        Made(tmp_path / "kv")(blocks=0)


def test_the_page_cache_is_bypassed_only_below_a_host_tier(tmp_path: Path) -> None:
    context = TierContext("f", LAYOUT, lambda keys: None)
    for host_gib, direct in ((1.0, True), (0.0, False)):
        tier = disk_tier(StoreSettings(host_gib=host_gib, disk_dir=str(tmp_path / "kv")), context)
        assert isinstance(tier, DiskTier)
        assert (tier._reads.direct, tier._writes.direct) == (direct, True)
        tier.close()


def test_the_journal_continues_in_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_journal, "_ROTATE_BYTES", 500)
    path = tmp_path / "journal"
    one, two, three = DiskJournal(path), DiskJournal(path), DiskJournal(path)
    changes = [JournalChange(bytes([number]) * 24, number, number % 2 == 0) for number in range(200)]
    seen: list[JournalChange] = []
    for at, change in enumerate(changes):
        (one, two)[at % 2].append([change])
        if at % 3 == 0:
            seen += three.read_changes()
    seen += three.read_changes()
    assert list(dict.fromkeys(seen)) == changes  # some arrived twice, but none was lost
    assert not path.exists() or path.stat().st_size <= 600
    for journal in (one, two, three):
        journal.close()


def test_a_record_truncated_by_a_full_disk_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    one, two = DiskJournal(path), DiskJournal(path)
    first, second = JournalChange(b"a" * 24, 1, True), JournalChange(b"b" * 24, 2, False)
    one.append([first])
    with path.open("ab") as file:
        file.write(path.read_bytes()[:20])
    one.append([second])
    assert two.read_changes() == [first, second]
    one.close()
    two.close()
