"""RequestDigest: what is kept of a request that has ended, and what follows from it: tiers, parts of the TTFT, costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stoker.gateway.admission.prices import Price, in_currency
from stoker.gateway.insight.series_columns import TIERS
from stoker.gateway.records.usage_row import UsageRow
from stoker.routing.query import Reason, Route, RouteQuery

_MAX_CANDIDATES = 8  # kept of each request, the cheapest first
_OK = 200


class RequestTimes(msgspec.Struct, frozen=True, gc=False):
    """The times at which the request passed each stage, on the gateway's clock. None: it did not get there."""

    arrived_s: float
    sent_s: float | None = None
    handed_off_s: float | None = None
    first_byte_s: float | None = None
    streams: bool = True


class RequestDigest(msgspec.Struct, frozen=True):
    """One request, for the pages about requests and sessions. It holds nothing of its text."""

    row: UsageRow
    parent: str | None
    prefill_worker: str
    num_retries: int
    tier_tokens: tuple[int, ...]  # cached tokens by tier, in the order of TIERS
    # Of the time to the first token, in the order of TTFT_PARTS. Empty: not a stream, or nothing was sent.
    parts_ms: tuple[float, ...]
    reasons: Sequence[Reason]
    cost: int  # in units of the price list
    saved: int  # what the cached tokens would have cost more
    saved_prefill_s: float
    is_good: bool

    def as_dict(self, *, with_candidates: bool = False) -> dict[str, object]:
        """Return the request for the admin API."""
        shown: dict[str, object] = msgspec.structs.asdict(self.row)
        shown |= {
            "parent": self.parent,
            "prefill_worker": self.prefill_worker,
            "retries": self.num_retries,
            "tiers": dict(zip(TIERS, self.tier_tokens, strict=True)),
            "parts_ms": [round(one, 3) for one in self.parts_ms],
            "cost": in_currency(self.cost),
            "saved": in_currency(self.saved),
            "good": self.is_good,
        }
        if with_candidates:
            shown["candidates"] = [reason.as_dict() for reason in self.reasons]
        return shown


def digest_of(
    row: UsageRow,
    route: Route | None,
    query: RouteQuery | None,
    times: RequestTimes,
    num_retries: int,
    price: Price,
    *,
    ttft_goal_ms: float,
    itl_goal_ms: float,
) -> RequestDigest:
    """Derive everything about a request from its row, its route and its times."""
    cached = row.cached_tokens
    rate = 0.0
    reasons: Sequence[Reason] = ()
    prefill_worker = ""
    if route is not None:
        leg = route.prefill or route.decode
        rate = leg.worker.tokens_per_s
        prefill_worker = "" if route.prefill is None else str(route.prefill.worker.worker_id)
        reasons = route.reasons
        if len(reasons) > _MAX_CANDIDATES:
            reasons = sorted(reasons, key=lambda one: one.cost_s)[:_MAX_CANDIDATES]
    parts = _parts_ms(row, times, rate) if times.streams and row.ttft_ms is not None else ()
    return RequestDigest(
        row,
        None if query is None else query.parent_session,
        prefill_worker,
        num_retries,
        tier_tokens(cached, route, 0 if query is None else query.block_tokens),
        parts,
        reasons,
        price.units(row.prompt_tokens, cached, row.completion_tokens),
        cached * (price.input - price.cached_input),
        cached / rate if rate > 0 else 0.0,
        _is_good(row, times.streams, ttft_goal_ms, itl_goal_ms),
    )


def tier_tokens(cached_tokens: int, route: Route | None, block_tokens: int) -> tuple[int, ...]:
    """Split the cached tokens by the tiers in which the worker had them when the route was chosen.

    Blocks that the gateway did not know of count as the device's. Every store below the host's memory counts as disk.
    """
    if not cached_tokens or route is None:
        return cached_tokens, 0, 0
    match = route.matches.get((route.prefill or route.decode).worker.worker_id)
    if match is None or not (match.host_blocks or match.disk_blocks):
        return cached_tokens, 0, 0
    device = min(cached_tokens, match.device_blocks * block_tokens)
    host = min(cached_tokens - device, match.host_blocks * block_tokens)
    disk = min(cached_tokens - device - host, match.disk_blocks * block_tokens)
    return cached_tokens - host - disk, host, disk


def _parts_ms(row: UsageRow, times: RequestTimes, tokens_per_s: float) -> tuple[float, ...]:
    """Split the time to the first byte. They add up to it.

    Prefill is estimated from the uncached tokens and the worker's speed. What else the worker took is its wait.
    """
    ttft_ms = row.ttft_ms or 0.0
    sent_ms = ttft_ms if times.sent_s is None else min(ttft_ms, 1e3 * (times.sent_s - times.arrived_s))
    queue_ms = min(row.queued_ms, sent_ms)
    worker_ms = ttft_ms - sent_ms
    transfer_ms = 0.0
    if times.handed_off_s is not None and times.first_byte_s is not None:
        transfer_ms = min(max(0.0, 1e3 * (times.first_byte_s - times.handed_off_s)), worker_ms)
        worker_ms -= transfer_ms
    uncached = row.prompt_tokens - row.cached_tokens
    prefill_ms = min(worker_ms, 1e3 * uncached / tokens_per_s) if tokens_per_s > 0 else worker_ms
    return queue_ms, sent_ms - queue_ms, worker_ms - prefill_ms, prefill_ms, transfer_ms


def _is_good(row: UsageRow, streams: bool, ttft_goal_ms: float, itl_goal_ms: float) -> bool:
    """Return True if a request succeeded within both goals. An answer that is not streamed may take their sum."""
    if row.status != _OK or row.error is not None or row.ttft_ms is None:
        return False
    gaps = max(0, row.completion_tokens - 1)
    if not streams:
        return row.e2e_ms <= ttft_goal_ms + gaps * itl_goal_ms
    return row.ttft_ms <= ttft_goal_ms and row.e2e_ms - row.ttft_ms <= gaps * itl_goal_ms
