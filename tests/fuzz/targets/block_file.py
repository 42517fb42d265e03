"""Block files of the disk tier, plain and encrypted, its journal, and the marker of its directory."""

from __future__ import annotations

import random
import struct
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.checksum import checksum
from stoker.kv.store.tiers.disk.block_file import PAGE, BlockFiles, CorruptBlock
from stoker.kv.store.tiers.disk.disk_directory import check_marker
from stoker.kv.store.tiers.disk.disk_encryption import Cipher
from stoker.kv.store.tiers.disk.disk_journal import DiskJournal
from tests.fuzz.target import FuzzTarget

_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-blocks-"))
_BLOCK_BYTES, _BLOCK_TOKENS = 6000, 16
_KEY = BlockKey(bytes(range(16)))
_CIPHER = Cipher(bytes(32))
_FILES = [BlockFiles(_BLOCK_BYTES, _BLOCK_TOKENS, cipher, direct=False) for cipher in (None, _CIPHER)]
_ORIGINAL = np.arange(_BLOCK_BYTES, dtype=np.uint32).astype(np.uint8)
_MARK = b"kv\r\n"


def execute(data: bytes, rng: random.Random) -> None:
    path = _FOLDER / "block"
    path.write_bytes(data)
    for files in _FILES:
        into = np.zeros(_BLOCK_BYTES, np.uint8)
        with suppress(CorruptBlock):
            files.read(str(path), _KEY, into, None)
        try:
            name = files.read_name(str(path), _KEY)
        except CorruptBlock:
            continue
        assert name.key == _KEY
        assert len(name.token_ids) <= len(data) // 4
    _read_journal(data)
    (_FOLDER / "store.json").write_bytes(data)
    for cipher in (None, _CIPHER):
        try:
            check_marker(_FOLDER, cipher)
        except ConfigError:
            continue


def _read_journal(data: bytes) -> None:
    path = _FOLDER / "journal"
    path.write_bytes(b"")
    journal = DiskJournal(path)
    try:
        with path.open("ab") as file:
            file.write(data)
        assert len(journal.read_changes()) <= len(data) // 48
    finally:
        journal.close()


def seeds() -> list[bytes]:
    contents = []
    for number, files in enumerate(_FILES):
        for salt in ("tenant", None):
            path = _FOLDER / f"seed-{number}-{salt}"
            path.unlink(missing_ok=True)
            files.write(str(path), BlockName(_KEY, _KEY, tuple(range(16)), salt), _ORIGINAL, checksum(_ORIGINAL), 0)
            contents.append(path.read_bytes())
    record = struct.pack("<4sI24sQ8s", _MARK, 1, bytes(24), 4096, bytes(8))
    return [*contents, (record + struct.pack("<I", zlib.crc32(record))) * 3, b'{"proof": null}']


def repair(data: bytes) -> bytes:
    """Recompute the checksum of a plain head."""
    if len(data) < 2 * PAGE:
        return data
    head = data[:12] + bytes(4) + data[16:PAGE]
    return head[:12] + struct.pack("<I", zlib.crc32(head)) + data[16:]


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(CorruptBlock, ConfigError),
    tokens=[b"stokerkv", _MARK, b'{"proof": "', b'{"proof": null}'],
    repair=repair,
    is_network=False,
)
