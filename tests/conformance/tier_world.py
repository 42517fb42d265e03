"""The worlds in which test_tiers.py runs every registered tier.

`tier_worlds/NAME.py` describes the worlds of the tier NAME: `WORLDS`, a tuple of functions that take a temporary directory and
yield one TierWorld. A tier without such a file is built from `StoreSettings(tiers=("NAME,gib=...",))` and must evict the least
recently used block when it is full.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.store.tiers.tier import TIERS, Tier, TierContext, build_tier

LAYOUT = KvLayout.of(num_layers=2, num_heads=2, width=64, block_tokens=64, dtype="float32", dtype_bytes=4)
BLOCK = LAYOUT.block_bytes
CAPACITY = 16  # blocks
FINGERPRINT = "conformance"
WORLD_FILES = Path(__file__).parent / "tier_worlds"


@dataclass
class TierWorld:
    """One tier with its medium."""

    tier_name: str
    settings: Callable[[int], StoreSettings]  # the settings for a tier of this many blocks
    is_exact: bool = True  # holds exactly that many blocks, and then evicts the least recently used one
    outlives_writers: bool = True  # blocks stay when the process that wrote them ends
    corrupt: Callable[[Tier, BlockKey], None] | None = None  # changes a block's bytes where they are stored
    hurry: Callable[[], object] = lambda: None  # from now on calls have the timeouts of production
    lost: list[BlockKey] = field(default_factory=list)
    made: list[Tier] = field(default_factory=list)

    def make(self, num_blocks: int = CAPACITY) -> Tier:
        tier = make_tier(self.tier_name, self.settings(num_blocks), self.lost)
        self.made.append(tier)
        return tier


def make_tier(tier_name: str, settings: StoreSettings, lost: list[BlockKey]) -> Tier:
    tier = build_tier(tier_name, settings, TierContext(FINGERPRINT, LAYOUT, lost.extend))
    assert tier is not None
    return tier


def gib(num_blocks: int, overhead_bytes: int = 0) -> float:
    return num_blocks * (BLOCK + overhead_bytes) / 2**30


def default_world(tier_name: str, tmp_path: Path) -> Iterator[TierWorld]:
    """The world of a tier that has no file in tier_worlds/."""

    def settings(num_blocks: int) -> StoreSettings:
        return StoreSettings(tiers=(f"{tier_name},gib={gib(num_blocks)!r}",))

    try:
        make_tier(tier_name, settings(CAPACITY), []).close()
    except ConfigError as failed:
        pytest.fail(
            f"tier {tier_name!r} has no world: let it accept the option gib (capacity in GiB), or add "
            f"tests/conformance/tier_worlds/{tier_name}.py, as tier_worlds/disk.py is ({failed.message})"
        )
    yield TierWorld(tier_name, settings)


def worlds() -> dict[str, Callable[[Path], Iterator[TierWorld]]]:
    """Return the worlds of all registered tiers, by name."""
    found: dict[str, Callable[[Path], Iterator[TierWorld]]] = {}
    for tier_name in TIERS:
        if (WORLD_FILES / f"{tier_name}.py").exists():
            module = importlib.import_module(f"tier_worlds.{tier_name}")
            found |= {make.__name__: make for make in module.WORLDS}
        else:
            found[tier_name] = partial(default_world, tier_name)
    return found
