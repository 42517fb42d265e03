"""`/admin/*`: shows fleet, recent routes, reservations and queues; changes the worker list, drains and roles. All JSON.

Requests need the admin token. If none is configured, the admin API is disabled. It only reads the state of other
components; changes of the worker list go through `MembershipChanges`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from inspect import isawaitable
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from stoker.base.errors import ConfigError, InvalidRequest, NotFound, Overloaded
from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.base.settings import from_table
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import Role
from stoker.gateway.admission.admin_access import admin_refusal
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.api_keys import AdminToken
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, error_reply, json_reply, method_not_allowed
from stoker.gateway.duties import Duties
from stoker.gateway.store.audit import AUDIT_TABLES, audit, last_audits
from stoker.gateway.store.store import StoreRefused
from stoker.gateway.store.store_threads import StoreThreads
from stoker.gateway.upgrades import UpgradeBoard
from stoker.gateway.watch.registration import MembershipChanges
from stoker.gateway.worker_option import WorkerSettings, worker_spec
from stoker.proto.admin_api import (
    ADMIN_DRAIN_PATH,
    ADMIN_FLEET_PATH,
    ADMIN_MISSES_PATH,
    ADMIN_ROLE_PATH,
    ADMIN_SCALE_PATH,
    ADMIN_STATUS_PATH,
    ADMIN_UNDRAIN_PATH,
    ADMIN_UPGRADE_HOLD_PATH,
    ADMIN_UPGRADE_PATH,
    ADMIN_UPGRADE_RELEASE_PATH,
    GatewayStatus,
    MissList,
    ReportedLoad,
    ReservedLoad,
    ScaleWishes,
    UpgradeStatus,
    WorkerList,
    WorkerStatus,
)
from stoker.routing.router import Router

_MAX_ROUTES = 1000
_AUDIT_PATH = b"/admin/audit"
_AUDIT_BYTES = 512
_NOT_AUDITED = ADMIN_UPGRADE_HOLD_PATH.encode()  # repeated every few seconds while an upgrade runs
_MAX_HOLDER = 128

log = EventLog("admin")


@dataclass(frozen=True, slots=True)
class AdminView:
    """The components whose state the admin API shows. They are read when a request arrives."""

    fleet: Fleet
    load_book: LoadBook
    router: Router
    admission: Admission
    workers: MembershipChanges
    duties: Duties
    upgrades: UpgradeBoard
    wishes: Callable[[], ScaleWishes]
    clock: Callable[[], float]
    status: Callable[[], GatewayStatus]
    misses: Callable[[str | None], MissList]


class AdminEndpoint:
    """Handles all paths below /admin/."""

    def __init__(self, token: AdminToken, view: AdminView, store: StoreThreads | None = None) -> None:
        """Without a store, changes are only logged."""
        self._token = token
        self._view = view
        self._store = store
        if store is not None:
            store.store.declare(AUDIT_TABLES)
        self._routes: dict[tuple[bytes, bytes], Callable[[EndpointRequest, dict[str, str]], Any]] = {
            (b"GET", ADMIN_STATUS_PATH.encode()): self._status,
            (b"GET", ADMIN_FLEET_PATH.encode()): self._fleet,
            (b"GET", b"/admin/routes"): self._last_routes,
            (b"GET", b"/admin/ledger"): self._ledger,
            (b"GET", b"/admin/queues"): self._queues,
            (b"GET", ADMIN_MISSES_PATH.encode()): self._misses,
            (b"GET", ADMIN_SCALE_PATH.encode()): self._scale,
            (b"GET", ADMIN_UPGRADE_PATH.encode()): self._upgrade,
            (b"GET", _AUDIT_PATH): self._no_audit,
            (b"POST", ADMIN_DRAIN_PATH.encode()): self._drain,
            (b"POST", ADMIN_UNDRAIN_PATH.encode()): self._undrain,
            (b"POST", ADMIN_ROLE_PATH.encode()): self._set_role,
            (b"POST", ADMIN_UPGRADE_PATH.encode()): self._wish_upgrade,
            (b"POST", ADMIN_UPGRADE_HOLD_PATH.encode()): self._hold_upgrade,
            (b"POST", ADMIN_UPGRADE_RELEASE_PATH.encode()): self._release_upgrade,
            (b"POST", b"/admin/workers"): self._add_worker,
            (b"DELETE", b"/admin/workers"): self._remove_worker,
        }

    async def answer(self, request: EndpointRequest) -> Reply:
        refusal = admin_refusal(self._token, request)
        if refusal is not None:
            return refusal
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            allowed = sorted({method for method, path in self._routes if path == request.path})
            if not allowed:
                return error_reply(404, f"No such path: {request.path.decode('latin-1')}.", code="unknown_url")
            return method_not_allowed(request.path, request.method, allowed)
        query = dict(parse_qsl(request.query.decode("latin-1"), keep_blank_values=True))
        if request.path == _AUDIT_PATH and self._store is not None:
            count = _count(query, 100)
            return json_reply({"audit": await self._store.read(lambda reader: last_audits(reader, count))})
        answer = handler(request, query)
        if isawaitable(answer):
            answer = await answer
        if request.method != b"GET" and request.path != _NOT_AUDITED:
            await self._audit(request, query)
        return json_reply(answer)

    async def _audit(self, request: EndpointRequest, query: dict[str, str]) -> None:
        """Write the change to the audit log. It has taken effect, so a store that is not available cannot refuse it."""
        if self._store is None:
            return
        action = f"{request.method.decode()} {request.path.decode('latin-1')}"
        target = query.get("worker", "") or request.body[:_AUDIT_BYTES].decode("utf-8", "replace")
        try:
            await self._store.write(lambda changes: audit(changes, "admin", action, target))
        except (Overloaded, StoreRefused) as error:
            log.error("audit_not_written", action=action, target=target, reason=error.message)

    # ---- reading

    def _status(self, request: EndpointRequest, query: dict[str, str]) -> GatewayStatus:
        changes = sorted({path.decode() for method, path in self._routes if method == b"POST"})
        return msgspec.structs.replace(self._view.status(), changes=changes)

    def _fleet(self, request: EndpointRequest, query: dict[str, str]) -> WorkerList:
        now = self._view.clock()
        return WorkerList(workers=[self._describe(member, now) for member in self._view.fleet.members()])

    def _last_routes(self, request: EndpointRequest, query: dict[str, str]) -> dict[str, Any]:
        now = self._view.clock()
        routes = self._view.router.explain_last(_count(query, 20))
        return {"routes": [{"age_s": round(now - _float(route["at"]), 3), **route} for route in routes]}

    def _ledger(self, request: EndpointRequest, query: dict[str, str]) -> dict[str, Any]:
        """Return reservations and admissions. All are zero when no request is running; anything else is a leak."""
        admission = self._view.admission
        return {
            "reserved": asdict(self._view.load_book.totals()),
            "admitted": {"requests": admission.num_in_flight, "prefill_tokens": admission.tokens_in_flight},
            "waiting": admission.num_waiting,
        }

    def _no_audit(self, request: EndpointRequest, query: dict[str, str]) -> None:
        raise NotFound("There is no audit log: the gateway was started with --store none.")

    def _queues(self, request: EndpointRequest, query: dict[str, str]) -> dict[str, Any]:
        return {"queues": self._view.admission.describe()}

    def _misses(self, request: EndpointRequest, query: dict[str, str]) -> MissList:
        return self._view.misses(query.get("key"))

    def _scale(self, request: EndpointRequest, query: dict[str, str]) -> ScaleWishes:
        return self._view.wishes()

    def _upgrade(self, request: EndpointRequest, query: dict[str, str]) -> UpgradeStatus:
        return self._view.upgrades.status(follows=_flag(query, "follows"))

    # ---- changing

    def _wish_upgrade(self, request: EndpointRequest, query: dict[str, str]) -> UpgradeStatus:
        return self._view.upgrades.wish([self._member(query).worker_id] if "worker" in query else [])

    def _hold_upgrade(self, request: EndpointRequest, query: dict[str, str]) -> UpgradeStatus:
        return self._view.upgrades.hold(_holder(query), query.get("line", ""))

    def _release_upgrade(self, request: EndpointRequest, query: dict[str, str]) -> UpgradeStatus:
        return self._view.upgrades.release(_holder(query), query.get("outcome", ""))

    async def _drain(self, request: EndpointRequest, query: dict[str, str]) -> WorkerStatus:
        member = self._member(query)
        await self._view.duties.drain(member, move=_flag(query, "move"))
        return self._describe(member, self._view.clock())

    async def _undrain(self, request: EndpointRequest, query: dict[str, str]) -> WorkerStatus:
        member = self._member(query)
        await self._view.duties.undrain(member)
        return self._describe(member, self._view.clock())

    async def _set_role(self, request: EndpointRequest, query: dict[str, str]) -> WorkerStatus:
        member, name = self._member(query), query.get("role", "")
        if name not in set(Role):
            roles = ", ".join(role.value for role in Role)
            raise InvalidRequest(f"role={name[:40]!r}: it must be one of {roles}.", param="role")
        await self._view.duties.set_role(member, Role(name), move=_flag(query, "move"))
        return self._describe(member, self._view.clock())

    def _add_worker(self, request: EndpointRequest, query: dict[str, str]) -> WorkerStatus | dict[str, Any]:
        try:
            spec = worker_spec(_worker_settings(request.body))
            self._view.workers.add(spec)
        except ConfigError as error:
            raise InvalidRequest(error.message) from error
        log.event("worker_added", worker=spec.worker_id, url=spec.url)
        member = self._view.fleet.member(spec.worker_id)
        return {"worker": spec.worker_id} if member is None else self._describe(member, self._view.clock())

    def _remove_worker(self, request: EndpointRequest, query: dict[str, str]) -> dict[str, Any]:
        worker_id = self._member(query).worker_id
        self._view.workers.remove(worker_id)
        log.event("worker_removed", worker=worker_id)
        return {"worker": worker_id, "removed": True}

    def _member(self, query: dict[str, str]) -> Member:
        name = query.get("worker")
        if not name:
            raise InvalidRequest("The query parameter 'worker' is missing: add ?worker=HOST:PORT", param="worker")
        member = self._view.fleet.member(WorkerId(name))
        if member is None:
            names = ", ".join(sorted(member.worker_id for member in self._view.fleet.members())) or "none"
            raise NotFound(f"There is no worker {name!r}. The gateway's workers are: {names}")
        return member

    def _describe(self, member: Member, now: float) -> WorkerStatus:
        spec, health, report = member.spec, member.health, member.report
        load = self._view.load_book.load(member.worker_id, now, self._view.fleet.prefill_rate(member))
        return WorkerStatus(
            worker=member.worker_id,
            url=spec.url,
            role=spec.role.value,
            dialect=spec.dialect,
            cluster=spec.cluster,
            weight=spec.weight,
            labels=dict(spec.labels),
            models=sorted(member.models),
            from_config=spec.from_config,
            usable=health.usable(now),
            breaker=health.breaker(now).value,
            draining=health.draining,
            busy=health.busy(now),
            share=round(health.share(now), 3),
            report=None if report is None else ReportedLoad(**asdict(report)),
            report_age_s=None if report is None else round(now - member.reported_at, 3),
            prefill_tokens_per_s=round(self._view.fleet.prefill_rate(member), 1),
            step_s=round(self._view.fleet.step_s(member), 6),
            reserved=ReservedLoad(
                requests=load.requests,
                prefill_tokens=load.prefill_tokens,
                context_tokens=load.context_tokens,
                output_tokens=load.output_tokens,
            ),
        )


def _worker_settings(body: bytes) -> WorkerSettings:
    """Decode a worker with the keys of [[worker]] in the gateway's file. A null value is the same as a missing key."""
    try:
        table = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f'The body must be a worker such as {{"url": "http://host:port"}}: {error}') from error
    settings = from_table(WorkerSettings, {name: value for name, value in table.items() if value is not None}, "worker")
    if settings.api_key_file is not None:
        raise ConfigError("worker.api_key_file is not accepted here: set it in the gateway's configuration file")
    return settings


def _count(query: dict[str, str], default: int) -> int:
    text = query.get("n", str(default))
    if not (len(text) <= 8 and text.isdecimal() and 1 <= int(text) <= _MAX_ROUTES):
        raise InvalidRequest(f"n={text[:40]!r}: it must be a number from 1 to {_MAX_ROUTES}.", param="n")
    return int(text)


def _flag(query: dict[str, str], name: str) -> bool:
    text = query.get(name, "0")
    if text not in ("0", "1"):
        raise InvalidRequest(f"{name}={text[:40]!r}: it must be 0 or 1.", param=name)
    return text == "1"


def _holder(query: dict[str, str]) -> str:
    name = query.get("holder", "")
    if not 0 < len(name) <= _MAX_HOLDER:
        raise InvalidRequest(f"holder={name[:40]!r}: it must have 1 to {_MAX_HOLDER} characters.", param="holder")
    return name


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
