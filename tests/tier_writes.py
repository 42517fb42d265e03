"""Writes blocks into a tier with the checksums that the store computes once for all tiers."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.checksum import checksum
from stoker.kv.store.tiers.tier import HostBytes, Tier


def put(tier: Tier, names: Sequence[BlockName], data: Sequence[HostBytes]) -> list[bool]:
    return tier.write(names, data, [checksum(block) for block in data])
