"""A gateway out of its settings: every part is made here, once, and given what it needs.

`build_gateway` opens nothing but the ledger; `start` listens and begins to look at the workers; `close` ends all of it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import stoker
from stoker.base.allowance import allow_files
from stoker.base.errors import ConfigError, Overloaded
from stoker.base.log import EventLog
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.load_book import LoadBook, WorkerLoad
from stoker.gateway.admin import Admin, AdminView
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.api_keys import AdminToken, Keys
from stoker.gateway.admission.capacity import Capacities
from stoker.gateway.config import GatewayConfig, ListenSettings, read_secret
from stoker.gateway.http import Server, ServerLimits
from stoker.gateway.membership import Workers
from stoker.gateway.path.app import Gateway, Parts
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.path.handoff_notes import HandoffNotes
from stoker.gateway.path.legs import Cleanups, Tools
from stoker.gateway.path.proxy import Proxy
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.prefix.conversation import KeyMakers
from stoker.gateway.records.meter import Meter, NoMeter
from stoker.gateway.records.metrics import GatewayMetrics, Sample
from stoker.gateway.records.prices import PriceList
from stoker.gateway.records.request_log import NoRequestLog, RequestLog
from stoker.gateway.records.tracing import Tracing, make_tracing
from stoker.gateway.records.usage_endpoint import Usage
from stoker.gateway.watch.registration import Registration
from stoker.gateway.watch.watchers import Watchers, WatchSettings
from stoker.proto.admin_api import GatewayStatus
from stoker.routing.router import PrefixIndexes, Router

_CUT_S = 0.5  # for connections to end by themselves once the gateway stops
_LOOK_S = 3.0  # at most so long the first look at the workers may hold up the start
_OTHER_FILES = 1024  # besides connections: the ledger, events of workers, idle connections

log = EventLog("gateway")


@dataclass(slots=True, eq=False)
class GatewayServer:
    """A gateway that can be started and stopped."""

    config: GatewayConfig
    server: Server
    state: GatewayState
    fleet: Fleet
    workers: Workers
    proxy: Proxy
    key_makers: KeyMakers
    meter: Meter | NoMeter
    request_log: RequestLog | NoRequestLog
    tracing: Tracing
    tls: ssl.SSLContext | None

    @property
    def num_running(self) -> int:
        return self.state.num_running

    @property
    def num_workers(self) -> int:
        return len(self.fleet.members())

    def models(self) -> list[str]:
        return sorted(self.fleet.models())

    async def start(self, listener: socket.socket) -> None:
        wanted = 2 * self.config.listen.max_connections + _OTHER_FILES  # a client's connection, and one to a worker
        if (allowed := allow_files(wanted)) < wanted:
            log.warning("few_open_files", allowed=allowed, wanted=wanted, hint="raise `ulimit -Hn`")
        for spec in self.config.worker_specs():
            self.workers.add(spec)
        await self.workers.looked(_LOOK_S)
        await self.server.listen("", 0, sock=listener, ssl=self.tls)

    def begin_drain(self) -> None:
        self.state.begin_drain()

    async def wait_idle(self) -> None:
        await self.state.wait_idle()

    async def close(self) -> None:
        """Whatever still runs is cut. Rows and spans that are not out yet are written."""
        await self.server.close(_CUT_S)
        await self.workers.close()
        await self.proxy.close()
        self.key_makers.close()
        await asyncio.to_thread(self.tracing.close)
        await asyncio.to_thread(self.request_log.close)
        await asyncio.to_thread(self.meter.close)


def build_gateway(config: GatewayConfig) -> GatewayServer:
    clock = time.monotonic
    admin_token = AdminToken(read_secret(config.admin_token_file, "admin_token_file"))
    secret = read_secret(config.secret_file, "secret_file")
    tls = _tls(config.listen)
    keys = Keys(config.key, config.tenant)
    fleet, load_book, indexes = Fleet(), LoadBook(), PrefixIndexes(config.routing.index_blocks)
    router = Router(fleet, load_book, indexes, settings=config.routing)
    metrics, state = GatewayMetrics(), GatewayState()
    api_keys = _api_keys(config)
    upstreams = Upstreams(api_keys=api_keys)
    key_makers = KeyMakers()
    watchers = Watchers(
        fleet,
        indexes,
        key_makers,
        WatchSettings(tokenize=config.routing.tokenize),
        secret=secret,
        api_keys=api_keys,
        clock=clock,
        on_lost=upstreams.cut,
    )
    notes = HandoffNotes(watchers.info, secret)
    tools = Tools(fleet, upstreams, config.proxy, metrics, Cleanups(), clock, notes)
    proxy = Proxy(router, tools, resume_grace_s=config.proxy.resume_grace_s, debug_routes=config.routing.debug_routes)
    workers = Workers(fleet, load_book, watchers, upstreams, clock)
    ledger_path = config.meter.ledger
    meter = NoMeter() if ledger_path is None else Meter(ledger_path, config.meter, PriceList(config.price))
    request_log = RequestLog() if config.log_requests else NoRequestLog()
    tracing = make_tracing(config.tracing)
    capacities = Capacities(fleet, config.admission)
    admission = Admission(
        config.admission, capacities.capacity, clock=clock, lane=capacities.lane, gate=partial(_shut, state, meter)
    )
    started_s = clock()

    def status() -> GatewayStatus:
        return GatewayStatus(
            version=stoker.__version__,
            uptime_s=round(clock() - started_s, 1),
            draining=state.draining,
            running_requests=state.num_running,
            waiting_requests=admission.num_waiting,
            policy=config.routing.policy,
            ledger=None if meter.path is None else str(meter.path),
            ledger_pending_rows=meter.pending,
        )

    view = AdminView(fleet, load_book, router, admission, workers, clock, status)
    gateway = Gateway(
        Parts(
            fleet=fleet,
            indexes=indexes,
            proxy=proxy,
            keys=keys,
            admission=admission,
            key_makers=key_makers,
            meter=meter,
            request_log=request_log,
            metrics=metrics,
            tracing=tracing,
            state=state,
            admin=Admin(admin_token, view),
            usage=Usage(ledger_path, keys, admin_token, currency=config.meter.currency),
            registration=Registration(secret, fleet, workers),
            clock=clock,
        )
    )
    limits = ServerLimits(
        max_body_bytes=int(config.listen.max_body_mib * (1 << 20)), max_connections=config.listen.max_connections
    )
    server = Server(gateway.handle, limits, on_bad=gateway.saw_bad_request)
    _add_gauges(metrics, fleet, load_book, indexes, admission, meter, server, state)
    return GatewayServer(config, server, state, fleet, workers, proxy, key_makers, meter, request_log, tracing, tls)


def _shut(state: GatewayState, meter: Meter | NoMeter) -> Overloaded | None:
    """Why nobody is let in now."""
    if meter.behind:
        message = f"{meter.pending} usage rows wait to be written: no request is taken that could not be accounted for."
        return Overloaded(message, retry_after_s=5.0, code="ledger_behind")
    return state.refusal() if state.draining else None


def _tls(listen: ListenSettings) -> ssl.SSLContext | None:
    if listen.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listen.tls_cert, listen.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"listen.tls_cert={listen.tls_cert}, listen.tls_key={listen.tls_key}: {error}") from error
    return context


def _api_keys(config: GatewayConfig) -> dict[str, str]:
    """By worker URL."""
    found = {one.url.rstrip("/"): read_secret(one.api_key_file, "api_key_file") for one in config.worker}
    return {url: key for url, key in found.items() if key is not None}


def _add_gauges(
    metrics: GatewayMetrics,
    fleet: Fleet,
    load_book: LoadBook,
    indexes: PrefixIndexes,
    admission: Admission,
    meter: Meter | NoMeter,
    server: Server,
    state: GatewayState,
) -> None:
    def of_workers(read: Callable[[Member, float], float]) -> Iterator[Sample]:
        now = time.monotonic()
        return (((("worker", str(member.worker_id)),), float(read(member, now))) for member in fleet.members())

    def usable(member: Member, now: float) -> float:
        return member.health.usable(now)

    def load(member: Member, now: float) -> WorkerLoad:
        # With its rate: the load book's estimate of a prompt's progress moves with every look at it.
        return load_book.load(member.worker_id, now, fleet.prefill_rate(member))

    name = "stoker_gateway_{}".format
    metrics.gauge(name("running_requests"), "Requests being answered", lambda: state.num_running)
    metrics.gauge(name("waiting_requests"), "Requests in the queue", lambda: admission.num_waiting)
    metrics.gauge(name("connections"), "Client connections", lambda: server.num_connections)
    metrics.gauge(name("ledger_pending_rows"), "Usage rows not yet on disk", lambda: meter.pending)
    metrics.gauge(name("ledger_rows_total"), "Usage rows written", lambda: meter.written, kind="counter")
    metrics.gauges(name("worker_usable"), "1 if it may get requests", lambda: of_workers(usable))
    metrics.gauges(
        name("worker_requests"),
        "Requests given and not finished",
        lambda: of_workers(lambda member, now: load(member, now).requests),
    )
    metrics.gauges(
        name("worker_prefill_tokens"),
        "Uncached prompt tokens given and not computed",
        lambda: of_workers(lambda member, now: load(member, now).prefill_tokens),
    )
    metrics.gauges(
        name("worker_kv_used"), "Share of its KV memory in use", lambda: of_workers(lambda member, now: member.kv_used)
    )
    metrics.gauges(
        name("index_blocks"),
        "Prefix blocks remembered",
        lambda: (((("model", model),), float(len(index))) for model, index in indexes.items()),
    )
