"""The KV memory of all workers for the dashboard: their tiers, and what a larger cache would have hit.

The pages are read from the Stoker workers only while someone looks, and at most every few seconds.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from math import isfinite
from typing import Any

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, Member
from stoker.gateway.insight.reuse_curve import ReuseCurve
from stoker.proto.tier_metrics import read_tier_metrics

_KEPT_S = 5.0  # how long the pages are not read again
_DEADLINE_S = 4.0
_AT_ONCE = 16
_MOST = 1e15  # larger numbers on a page are wrong
_STOKER = "stoker"
# Names on a worker's /metrics page, and what they are called here.
_NUMBERS = {
    "stoker_kv_blocks": "blocks",
    "stoker_kv_blocks_free": "free_blocks",
    "stoker_kv_blocks_cached": "cached_blocks",
    "stoker_kv_loaded_tokens_total": "loaded_tokens",
    "stoker_kv_pulled_tokens_total": "pulled_tokens",
    "stoker_kv_failed_loads_total": "failed_loads",
    "stoker_preemptions_total": "preemptions",
    "stoker_draft_tokens_total": "draft_tokens",
    "stoker_accepted_draft_tokens_total": "accepted_draft_tokens",
}
_SAMPLE = re.compile(rf"^({'|'.join(_NUMBERS)}) (\S+)$", re.MULTILINE)

ReadPage = Callable[[WorkerId], Awaitable[bytes | None]]


class KvPages:
    """Reads and keeps the workers' pages. `read_page` returns a worker's /metrics, or None if it does not answer."""

    def __init__(self, fleet: Fleet, reuse: ReuseCurve, read_page: ReadPage, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._reuse = reuse
        self._read_page = read_page
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_s = float("-inf")
        self._workers: list[dict[str, Any]] = []

    async def report(self) -> dict[str, Any]:
        """Return the workers with their tiers, and the curve of hit ratios."""
        async with self._lock:  # one reader for all viewers
            if self._clock() - self._read_s >= _KEPT_S:
                self._workers = await self._read_all()
                self._read_s = self._clock()
        workers = self._workers
        capacity = sum(one["capacity_tokens"] for one in workers)
        per_token = [one["bytes_per_token"] for one in workers if one["bytes_per_token"]]
        return {
            "workers": workers,
            "capacity_tokens": capacity,
            "bytes_per_token": max(per_token, default=None),
            "reuse": {
                "points": self._reuse.points(),
                "now": None if not capacity else self._reuse.hit_ratio(capacity),
                "max_tokens": self._reuse.max_tokens,
            },
        }

    async def _read_all(self) -> list[dict[str, Any]]:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def read(member: Member) -> dict[str, Any]:
            async with slots:
                return await self._read(member)

        return list(await asyncio.gather(*map(read, self._fleet.members())))

    async def _read(self, member: Member) -> dict[str, Any]:
        page = None
        if member.spec.dialect == _STOKER:
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    page = await self._read_page(member.worker_id)
            except TimeoutError:
                page = None
        report = member.report
        block_tokens = (report.block_tokens if report else None) or 0
        num_blocks = (report.num_blocks if report else None) or 0
        tiers, numbers = ({}, {}) if page is None else _numbers(page.decode("utf-8", "replace"))
        filled = [one for one in tiers.values() if one.get("used_bytes") and one.get("blocks")]
        per_block = [one["used_bytes"] / one["blocks"] for one in filled]
        tier_blocks = sum(one.get("capacity_bytes", 0.0) * one["blocks"] / one["used_bytes"] for one in filled)
        return {
            "worker": member.worker_id,
            "role": member.spec.role.value,
            "answers": page is not None,
            "kv_used": member.kv_used if report else None,
            "block_tokens": block_tokens,
            "capacity_tokens": int(min((num_blocks + tier_blocks) * block_tokens, _MOST)),
            "bytes_per_token": per_block[0] / block_tokens if per_block and block_tokens else None,
            "tiers": tiers,
            **numbers,
        }


def _numbers(text: str) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the tiers and the other numbers of a worker's page. A page that cannot be read has none."""
    try:
        tiers = {name: _possible(tier) for name, tier in read_tier_metrics(text).items()}
        return tiers, _possible({_NUMBERS[name]: float(value) for name, value in _SAMPLE.findall(text)})
    except ValueError:
        return {}, {}


def _possible(numbers: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if isfinite(value) and 0 <= value <= _MOST}
