"""The disk tier: in plain text, and encrypted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from kv.mooncake_worker import PATIENCE_S
from tier_world import BLOCK, TierWorld, gib

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.store.tiers.tier import Tier


def world_of(tmp_path: Path, key_file: Path | None) -> Iterator[TierWorld]:
    def settings(num_blocks: int) -> StoreSettings:
        return StoreSettings(
            disk_dir=str(tmp_path / "kv"),
            disk_gib=gib(num_blocks, 8192 if key_file else 4096),
            disk_key_file=None if key_file is None else str(key_file),
        )

    def flip_on_disk(tier: Tier, key: BlockKey) -> None:
        (path,) = tmp_path.rglob(f"{key.hex()}.kv")
        data = bytearray(path.read_bytes())
        data[4096 + BLOCK // 2] ^= 1
        path.write_bytes(data)

    with (
        patch("stoker.kv.store.tiers.disk.disk_eviction._LOCK_S", PATIENCE_S),
        patch("stoker.kv.store.tiers.disk.disk_tier._LOOKUP_S", PATIENCE_S),
    ):
        yield TierWorld("disk", settings, corrupt=flip_on_disk)


def disk(tmp_path: Path) -> Iterator[TierWorld]:
    yield from world_of(tmp_path, None)


def disk_encrypted(tmp_path: Path) -> Iterator[TierWorld]:
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_bytes(bytes(range(32)))
    yield from world_of(tmp_path, key_file)


WORLDS = (disk, disk_encrypted)
