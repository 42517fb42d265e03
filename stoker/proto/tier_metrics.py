"""Metrics of the KV tiers on a worker's `/metrics` page, which `stoker status` reads."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import NamedTuple

TIER_LABEL = "tier"
_PREFIX = "stoker_kv_tier_"
_COUNTER_SUFFIX = "_total"  # Prometheus adds it to the name of a counter
_SAMPLE = re.compile(rf'{_PREFIX}(\w+)\{{{TIER_LABEL}="([^"]+)"\}} (\S+)')


class TierMetric(NamedTuple):
    field: str  # of `TierReport`
    name: str
    help: str
    is_counter: bool = False

    @property
    def full_name(self) -> str:
        return f"{_PREFIX}{self.name}"


# A value that is not known yet is left out of the page.
TIER_METRICS = (
    TierMetric("blocks", "blocks", "Blocks in the tier"),
    TierMetric("used_bytes", "used_bytes", "Bytes in the tier"),
    TierMetric("capacity_bytes", "capacity_bytes", "Bytes that the tier may hold"),
    TierMetric("bytes_per_s", "read_bytes_per_second", "Recent read speed"),
    TierMetric("crossover_tokens", "crossover_tokens", "Number of tokens from which loading is faster than computing"),
    TierMetric("hits", "hits", "Blocks read with a correct checksum", True),
    TierMetric("misses", "misses", "Blocks requested that were missing or corrupt", True),
    TierMetric("read_bytes", "read_bytes", "Bytes read", True),
    TierMetric("written_bytes", "written_bytes", "Bytes written", True),
    TierMetric("read_s", "read_seconds", "Time spent reading", True),
    TierMetric("write_s", "write_seconds", "Time spent writing", True),
    TierMetric("declined", "declined", "Blocks offered but not stored", True),
    TierMetric("evicted", "evicted", "Blocks evicted", True),
    TierMetric("corrupt", "corrupt", "Corrupt blocks found and dropped", True),
    TierMetric("errors", "errors", "Failed calls", True),
)


def read_tier_metrics(page: str) -> dict[str, dict[str, float]]:
    """Return the values on a `/metrics` page by tier and by `TierMetric.name`. What is no number is left out."""
    tiers: dict[str, dict[str, float]] = {}
    for name, tier, text in _SAMPLE.findall(page):
        with suppress(ValueError):
            value = float(text)
            if math.isfinite(value):
                tiers.setdefault(tier, {})[name.removesuffix(_COUNTER_SUFFIX)] = value
    return tiers
