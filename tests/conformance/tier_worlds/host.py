"""The host tier: private to a process, and shared by name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
from kv.mooncake_worker import PATIENCE_S
from tier_world import BLOCK, TierWorld, gib

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.kv.store.tiers.host.host_memory import remove_host_store
from stoker.kv.store.tiers.host.host_tier import HostTier
from stoker.kv.store.tiers.tier import Tier


def flip_in_memory(tier: Tier, key: BlockKey) -> None:
    assert isinstance(tier, HostTier)
    table = tier._open()
    slot = int(table.lookup(np.frombuffer(key, dtype="<u8").reshape(1, 2))[0])
    table.block(slot)[BLOCK // 2] ^= 1


def world_of(name: str | None) -> Iterator[TierWorld]:
    with patch("stoker.kv.store.tiers.host.host_tier.LOCK_S", PATIENCE_S):
        yield TierWorld(
            "host", lambda num_blocks: StoreSettings(name=name, host_gib=gib(num_blocks)), corrupt=flip_in_memory
        )


def host_private(tmp_path: Path) -> Iterator[TierWorld]:
    yield from world_of(None)


def host_shared(tmp_path: Path) -> Iterator[TierWorld]:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield from world_of(name)
    remove_host_store(name)


WORLDS = (host_private, host_shared)
