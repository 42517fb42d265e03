"""A tier's write, with the sums that the store makes once for all tiers."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.kv.checksum import checksum
from stoker.kv.tiers.contract import HostBytes, Tier
from stoker.kv.transfer import BlockName


def put(tier: Tier, names: Sequence[BlockName], data: Sequence[HostBytes]) -> list[bool]:
    return tier.write(names, data, [checksum(block) for block in data])
