"""The status of a fleet: its processes as `stoker up` reports them, workers as the gateway sees them, and their KV tiers.

Each process is queried once, with a timeout. A process that does not answer is shown as such.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from stoker.base.fleet_key import FleetKey
from stoker.proto.admin_api import (
    ADMIN_FLEET_PATH,
    ADMIN_STATUS_PATH,
    GatewayStatus,
    WorkerStatus,
    decode_gateway_status,
    decode_worker_list,
)
from stoker.proto.fleet_state import FleetState
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, RequestSigner
from stoker.proto.tier_metrics import read_tier_metrics
from stoker.up.supervisor import Phase
from stoker.up.terminal import printable, table

_T = TypeVar("_T")

_ANSWER_S = 3.0
_METRICS_PATH = "/metrics"
_GIB = 1 << 30
_SILENT = "silent"  # it answers no health check of `stoker up`
_HINTS = {
    401: ": pass its admin token with --admin-token-file",
    404: ": this is not a gateway. Pass a gateway's address, without a path",
}


@dataclass(frozen=True, slots=True)
class PartStatus:
    """One process: the gateway, a worker or a Mooncake master."""

    name: str
    role: str
    address: str
    health: str
    pid: int | None = None
    restarts: int | None = None
    hangs: int | None = None  # restarts because it answered no health check
    last_code: int | None = None
    log: str | None = None
    load: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)  # its machines, if it runs on others


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """A gateway and everything behind it."""

    gateway_url: str
    healthy: bool
    gateway: GatewayStatus | None  # its own /admin/status; None: it does not answer, or the token is wrong
    parts: list[PartStatus]
    pid: int | None = None  # of `stoker up`
    up_s: float | None = None
    models: list[str] = field(default_factory=list)
    reason: str | None = None  # why `gateway` is None

    def as_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(asdict(self)))


async def fleet_status(
    url: str, token: str | None, fleet: FleetState | None = None, secret: str | None = None
) -> FleetStatus:
    """Query a gateway and its workers. `fleet` is the state.json of `stoker up`, if the gateway belongs to it.

    Workers with a secret answer only requests that are signed with it.
    """
    key = FleetKey(secret) if secret else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        status: GatewayStatus | None = None
        known: dict[str, WorkerStatus] = {}
        reason = None
        try:
            status = await _get(session, url + ADMIN_STATUS_PATH, headers, decode_gateway_status)
            workers = (await _get(session, url + ADMIN_FLEET_PATH, headers, decode_worker_list)).workers
            known = {one.worker: one for one in workers}
        except (msgspec.MsgspecError, UnicodeDecodeError):
            status, reason = None, f"{url} does not answer as a gateway does"
        except aiohttp.ClientResponseError as error:
            reason = f"{url} answered HTTP {error.status}{_HINTS.get(error.status, '')}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = _no_answer(url, error)
        listed = _of_fleet(fleet, url, known, status) if fleet else []
        ours = {urlsplit(part.address).netloc for part in listed}
        others = [one for name, one in known.items() if name not in ours]
        listed += [PartStatus(one.worker, one.role, one.url, one.health, load=_load(one)) for one in others]
        pages = await asyncio.gather(*(_tiers(session, part, key) for part in listed))
    parts = [replace(part, tiers=tiers) for part, tiers in zip(listed, pages, strict=True)]
    healthy = reason is None and bool(parts) and all(part.health == "ready" for part in parts)
    return FleetStatus(
        gateway_url=url,
        healthy=healthy,
        gateway=status,
        parts=parts,
        pid=fleet.pid if fleet else None,
        up_s=round(max(0.0, time.time() - fleet.started_at), 1) if fleet else None,
        models=sorted({model for one in known.values() for model in one.models}) or (fleet.models if fleet else []),
        reason=reason,
    )


def _of_fleet(
    fleet: FleetState, url: str, known: dict[str, WorkerStatus], gateway: GatewayStatus | None
) -> list[PartStatus]:
    """Return the parts of a fleet. `gateway` is the status of the one at `url`."""
    parts = []
    for part in fleet.parts:
        worker = known.get(urlsplit(part.address).netloc)
        health, load = part.phase, {}
        if part.kind == "worker" and worker is not None:
            load = _load(worker)
            health = worker.health if part.phase == Phase.READY else part.phase
        elif part.kind == "gateway" and gateway is not None and part.address == url:
            load = {"running_requests": gateway.running_requests, "waiting_requests": gateway.waiting_requests}
            health = "draining" if gateway.draining else part.phase
        parts.append(
            PartStatus(
                name=part.name,
                role=part.role,
                address=part.address,
                health=str(health) if part.answers else _SILENT,
                pid=part.pid,
                nodes=part.nodes,
                restarts=part.restarts,
                hangs=part.hangs,
                last_code=part.last_code,
                log=part.log,
                load=load,
            )
        )
    return parts


def _load(worker: WorkerStatus) -> dict[str, Any]:
    load: dict[str, Any] = {"requests": worker.reserved.requests}
    if worker.report is not None:
        names = ("running_sequences", "waiting_sequences", "waiting_tokens", "kv_used")
        load |= {name: getattr(worker.report, name) for name in names}
    return load


async def _tiers(session: aiohttp.ClientSession, part: PartStatus, key: FleetKey | None) -> dict[str, dict[str, float]]:
    """Return a worker's metrics for each KV tier; empty if it has no tiers or does not answer."""
    if part.role not in ("prefill", "decode", "unified") or not part.address.startswith("http"):
        return {}
    try:
        signer, headers = None if key is None else RequestSigner(key), {}
        for _ in range(2):  # the first answer has the worker's challenge
            if signer is not None:
                headers = {AUTH_HEADER: signer.sign(b"GET", _METRICS_PATH.encode(), b"").decode()}
            async with session.get(part.address + _METRICS_PATH, headers=headers, ssl=False) as answer:
                if answer.status != 401 or signer is None:
                    return read_tier_metrics(await answer.text(errors="replace"))
                signer.learn(answer.headers.get(CHALLENGE_HEADER, "").encode())
        return {}
    except (aiohttp.ClientError, TimeoutError, OSError):
        return {}


async def _get(session: aiohttp.ClientSession, url: str, headers: dict[str, str], decode: Callable[[bytes], _T]) -> _T:
    async with session.get(url, headers=headers, ssl=False) as answer:
        answer.raise_for_status()
        return decode(await answer.read())


def _no_answer(url: str, error: BaseException) -> str:
    if not url:
        return "the gateway has no address yet: its log, gateway.log, says what it waits for"
    return (
        f"no gateway answers at {url} ({_words(error)}): check the address, or start one there with `stoker up` or "
        "`stoker gateway`"
    )


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_ANSWER_S:.0f} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # negative for errors of the name lookup
        return os.strerror(number) if number and number > 0 else str(error.os_error.strerror)
    return str(error) or type(error).__name__


# ---- as text


def format_status(status: FleetStatus) -> str:
    """Return the status as tables for a terminal."""
    up = "" if status.up_s is None else f", up for {_duration(status.up_s)}, process {status.pid}"
    lines = [
        f"Fleet at {status.gateway_url or 'no address yet'}{up}: {', '.join(status.models) or 'no model is known yet'}"
    ]
    if status.reason:
        lines.append(status.reason)
    rows: list[tuple[str, ...]] = [
        (
            part.name,
            part.role,
            part.health,
            part.address or "-",
            ", ".join(part.nodes) or "-",
            _or_dash(part.pid),
            _restarts_words(part),
            _load_words(part.load),
        )
        for part in status.parts
    ]
    head: tuple[str, ...] = ("PROCESS", "ROLE", "HEALTH", "ADDRESS", "NODE", "PID", "RESTARTS", "LOAD")
    if not any(part.nodes for part in status.parts):  # all of them run on this machine
        head, rows = (*head[:4], *head[5:]), [(*row[:4], *row[5:]) for row in rows]
    lines += ["", table(head, rows)]
    tiers = [_tier_row(part.name, tier, metrics) for part in status.parts for tier, metrics in part.tiers.items()]
    if tiers:
        lines += ["", table(("WORKER", "TIER", "BLOCKS", "USED", "OF", "HITS", "MISSES", "EVICTED", "ERRORS"), tiers)]
    return "\n".join(printable(line) for text in lines for line in text.split("\n"))


def _tier_row(part: str, tier: str, metrics: dict[str, float]) -> Sequence[str]:
    count = [f"{metrics[name]:,.0f}" if name in metrics else "-" for name in ("blocks", "hits", "misses", "evicted")]
    size = [_size(metrics[name]) if name in metrics else "-" for name in ("used_bytes", "capacity_bytes")]
    errors = metrics.get("errors", 0) + metrics.get("corrupt", 0)
    return (part, tier, count[0], *size, *count[1:], f"{errors:,.0f}")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / (1 << 20):.1f} MiB"


def _load_words(load: dict[str, Any]) -> str:
    words = []
    for name, unit in (
        ("requests", "in flight"),
        ("running_requests", "running"),
        ("waiting_requests", "waiting"),
        ("running_sequences", "running"),
        ("waiting_sequences", "waiting"),
    ):
        if name in load:
            words.append(f"{load[name]} {unit}")
    if "kv_used" in load:
        words.append(f"KV {100 * load['kv_used']:.0f}%")
    return ", ".join(words) or "-"


def _restarts_words(part: PartStatus) -> str:
    return _or_dash(part.restarts) + (f" ({part.hangs} silent)" if part.hangs else "")


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
