"""The contract of a KV tier: a store of blocks by key that is slower and larger than device memory.

The store's threads call a tier, several at a time. A call may block, but it must not hold the GIL while it moves bytes. A
tier is a cache: a block that is missing, late, truncated or wrong is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.base.registry import Registry
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.store.tiers.tier_options import TierOptions, parse_tier_options

HostBytes = NDArray[np.uint8]  # one block, contiguous, `layout.block_bytes` long


def _ignore(keys: Sequence[BlockKey]) -> None:
    return


@dataclass(slots=True)
class TierStats:
    """A tier's gauges, and its counters since this process started."""

    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    evicted: int = 0
    corrupt: int = 0  # blocks that failed a check; they were dropped and never served
    errors: int = 0


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is built with, besides the settings. The fingerprint names the model and, if there are several, the KV set
    and the rank's heads and layers. Blocks with other fingerprints may have the same keys, and are never mixed."""

    fingerprint: str
    layout: KvLayout
    on_evicted: Callable[[Sequence[BlockKey]], None]  # the tier calls it, from any thread, when it has lost blocks
    on_forgotten: Callable[[Sequence[BlockKey]], None] = _ignore  # the same, for blocks that the tier would take again
    headroom_bytes: int = 0  # bytes before every buffer that the tier may use while it has the buffer
    options: TierOptions | None = None  # this tier's entry in `StoreSettings.tiers`, None if it has none
    share: float = (
        1.0  # the part of the capacity that is for these blocks: each KV set of a model has a tier of its own
    )


class Tier(Protocol):
    medium: ClassVar[str]
    """The tier's medium in KV events: CPU, DISK, MOONCAKE."""

    shared_location: str | None
    """Where the blocks are, if other workers read and write the same blocks. Tiers with equal texts share blocks. None: the
    blocks belong to this process alone."""

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which blocks are in the tier now. Takes at most milliseconds for a thousand keys."""

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        """Read blocks into buffers. True: the buffer holds the block, and its checksum was correct. False: the block is
        missing or was wrong, and the buffer may hold anything; a wrong block is dropped and counted. Raises TierUnavailable
        if the tier cannot be read now. A call that hangs may fill the buffers later, so they must not be reused."""

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], checksums: Sequence[int]) -> list[bool]:
        """Write blocks. True: the block is in the tier now, whether new or not. False: the tier declined it. The checksums are
        computed once for all tiers; if the bytes change before they are written, a later read finds them wrong."""

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks."""

    def catch_up(self) -> None:
        """Report blocks that other processes removed, through `on_evicted`. Called about once a second. Removals by a process
        that died meanwhile may be reported late. Raises TierUnavailable if the tier cannot answer now."""

    def names(self) -> Iterator[BlockName]:
        """Yield all blocks that the tier knows it holds, parents before children where both are known."""

    def stats(self) -> TierStats:
        """Return the tier's gauges and counters."""

    def close(self) -> None:
        """Release all resources. Later reads raise TierUnavailable."""


class TierFactory(Protocol):
    def __call__(self, settings: StoreSettings, context: TierContext) -> Tier | None:
        """Build the tier, or return None if the settings do not ask for it."""


@dataclass(frozen=True, slots=True)
class RegisteredTier:
    distance: int
    factory: TierFactory


TIERS: Registry[RegisteredTier] = Registry("tier", "stoker.kv.store.tiers")


def register_tier(name: str, *, distance: int) -> Callable[[TierFactory], TierFactory]:
    """Register a tier under a name. The store searches tiers by increasing distance, so a faster tier has a smaller one: host
    100, disk 200, Mooncake 300."""

    def register(factory: TierFactory) -> TierFactory:
        TIERS.register(name)(RegisteredTier(distance, factory))
        return factory

    return register


def tier_names() -> list[str]:
    """Return the names of all registered tiers, nearest first."""
    return sorted(TIERS, key=lambda name: (TIERS.get(name).distance, name))


def build_tier(name: str, settings: StoreSettings, context: TierContext) -> Tier | None:
    """Build a tier, or return None if the settings do not ask for it."""
    options = parse_tier_options(settings.tiers).get(name)
    tier = TIERS.get(name).factory(settings, replace(context, options=options))
    if options is not None:
        if tier is None:
            raise ConfigError(f"store.tiers={name!r}: this tier has settings of its own and is not turned on here")
        options.check_all_used()
    return tier


def check_tier_names(settings: StoreSettings) -> None:
    """Raise ConfigError if the settings name a tier that does not exist."""
    for name in parse_tier_options(settings.tiers):
        TIERS.get(name, "--kv-tier")
