"""Builds a gateway from its settings: creates every component once and connects them.

`build_gateway` opens only the store. `GatewayServer.start` listens and begins to watch the workers; `close` stops everything.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce

import stoker
from stoker.base.allowance import allow_files
from stoker.base.errors import ConfigError, Overloaded
from stoker.base.fleet_key import FleetKey, read_fleet_secret
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.lost_blocks import LostBlocks
from stoker.fleet.other_load import NO_OTHERS, OtherLoad
from stoker.gateway.admin import AdminEndpoint, AdminView
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.api_keys import AdminToken, ApiKeys
from stoker.gateway.admission.budgets import spent_names
from stoker.gateway.admission.capacity import Capacities
from stoker.gateway.admission.flex import FlexGate
from stoker.gateway.admission.key_watch import KeyWatch, NoKeyWatch
from stoker.gateway.admission.limit_leases import LimitLeases, NoLeases
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.config import GatewayConfig, read_secret, read_secrets
from stoker.gateway.doctor.cache_doctor import CacheDoctor
from stoker.gateway.doctor.miss_totals import MissTotals
from stoker.gateway.duties import Duties
from stoker.gateway.gauges import add_flex_gauges, add_gauges, add_store_gauges, add_task_counters
from stoker.gateway.http import Server, ServerLimits
from stoker.gateway.insight.canary_watch import CanaryShare, CanaryWatch
from stoker.gateway.insight.fleet_gauges import read_fleet_gauges
from stoker.gateway.insight.insight_book import InsightBook
from stoker.gateway.insight.insight_endpoint import InsightEndpoint
from stoker.gateway.insight.kv_pages import KvPages
from stoker.gateway.insight.latency_goals import LatencyGoals
from stoker.gateway.insight.live_stream import LiveStream
from stoker.gateway.listen_settings import ListenSettings
from stoker.gateway.membership import Membership
from stoker.gateway.objects.tenant_objects import NoObjects, TenantObjects
from stoker.gateway.path.app import Gateway, GatewayParts
from stoker.gateway.path.call import requested_model
from stoker.gateway.path.dialects.dialect import resuming_dialects
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.path.embeddings import EmbeddingsEndpoint
from stoker.gateway.path.front_gate import FrontGate
from stoker.gateway.path.handoff_hints import HandoffHints
from stoker.gateway.path.model_aliases import ModelAliases
from stoker.gateway.path.moves import Moves
from stoker.gateway.path.proxy import Proxy
from stoker.gateway.path.services import CleanupTasks, ProxyServices
from stoker.gateway.path.tokenize import TokenizeEndpoint
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.prefix.conversation_keys import PrefixKeyMakers
from stoker.gateway.prefix.stable_json import StableJson
from stoker.gateway.process_supervisor import shared_listener
from stoker.gateway.processes import GroupEndpoint, GroupMetrics, ProcessGroup
from stoker.gateway.recording import RoutingClasses, routing_classes
from stoker.gateway.records.meter import Meter, NoMeter
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.records.metrics_endpoint import MetricsEndpoint
from stoker.gateway.records.request_log import NoRequestLog, RequestLog
from stoker.gateway.records.retention import Retention
from stoker.gateway.records.tracing import Tracing, make_tracing
from stoker.gateway.records.usage_endpoint import UsageEndpoint
from stoker.gateway.records.usage_row import UsageRow
from stoker.gateway.scaling import FleetSampler, ScaleBoard, Scaling
from stoker.gateway.store.location import StoreLocation
from stoker.gateway.store.store import Store
from stoker.gateway.store.store_threads import StoreThreads
from stoker.gateway.store.watched import WatchedStore
from stoker.gateway.twin_watch import make_twin
from stoker.gateway.ui.static_pages import StaticPages
from stoker.gateway.watch.other_work import OtherWork
from stoker.gateway.watch.registration import RegistrationEndpoint
from stoker.gateway.watch.watchers import Watchers, WatchSettings
from stoker.gateway.watch.worker_signers import WorkerSigners
from stoker.proto.admin_api import GatewayStatus
from stoker.proto.cors import CorsRules
from stoker.proto.signed_http import RequestSigner

_CLOSE_GRACE_S = 0.5  # grace period for client connections when the gateway stops
_FIRST_POLLS_S = 3.0  # the longest that the first polls of the workers may delay the start
# Threads that tokenize and hash long bodies give the interpreter lock back to the event loop after this time.
_SWITCH_INTERVAL_S = 0.0005
_OTHER_FILES = 1024  # open files besides connections in use: the ledger, KV event sockets, idle connections

log = EventLog("gateway")


@dataclass(slots=True, eq=False)
class GatewayServer:
    """A gateway that can be started and stopped."""

    config: GatewayConfig
    server: Server
    state: GatewayState
    fleet: Fleet
    membership: Membership
    proxy: Proxy
    key_makers: PrefixKeyMakers
    group: ProcessGroup
    keys: ApiKeys
    store: StoreThreads | None
    gateway: Gateway
    objects: TenantObjects | NoObjects
    key_watch: KeyWatch | NoKeyWatch
    leases: LimitLeases | NoLeases
    retention: Retention
    scaling: Scaling
    meter: Meter | NoMeter
    metrics: GatewayMetrics
    deciding: RoutingClasses
    request_log: RequestLog | NoRequestLog
    tracing: Tracing
    live: LiveStream
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
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # Each request has a connection to its client and one to a worker.
        needed = 2 * self.config.listen.max_connections + _OTHER_FILES
        if (allowed := allow_files(needed)) < needed:
            log.warning("few_open_files", allowed=allowed, wanted=needed, hint="raise `ulimit -Hn`")
        for spec in self.config.worker_specs():
            self.membership.add(spec)
        self.key_watch.start()
        self.retention.start()
        self.scaling.start()
        self.live.start()
        await self.membership.wait_first_polls(_FIRST_POLLS_S)
        self.objects.open(self.gateway.generate, self.gateway.run_line)
        await self.server.listen("", 0, sock=listener, ssl=self.tls)
        if self.config.process_ports:
            await self.server.listen(
                "", 0, sock=shared_listener("127.0.0.1", self.config.process_ports[self.config.process])
            )

    def announce_drain(self) -> None:
        """Leave the load balancers: `/ready` returns 503 and answers end their connections. Requests are still accepted."""
        self.state.announce_drain()
        self.objects.begin_drain()
        self.server.begin_drain()

    def begin_drain(self) -> None:
        """Refuse new requests. Running ones continue."""
        self.announce_drain()
        self.state.begin_drain()

    async def wait_idle(self) -> None:
        await self.state.wait_idle()

    async def close(self) -> None:
        """Stop now. Running requests are aborted; pending usage rows and trace spans are written."""
        await self.scaling.close()
        await self.server.close(_CLOSE_GRACE_S)
        await self.objects.close()
        await self.membership.close()
        await self.key_watch.close()
        await self.retention.close()
        await self.live.close()
        await self.proxy.close()
        await self.leases.close()
        self.group.close()
        self.key_makers.close()
        await asyncio.to_thread(self.tracing.close)
        await asyncio.to_thread(self.request_log.close)
        await asyncio.to_thread(self.deciding.close)
        await asyncio.to_thread(self.meter.close)
        if self.store is not None:
            await asyncio.to_thread(self.store.close)
            await asyncio.to_thread(self.store.store.close)


def build_gateway(config: GatewayConfig) -> GatewayServer:
    """Create all components of a gateway. Opens the store, but no sockets of its own."""
    clock, name = time.monotonic, gateway_name()
    admin_token = AdminToken(read_secrets(config.admin_token_file, "admin_token_file"))
    metrics_token = AdminToken(read_secrets(config.metrics_token_file, "metrics_token_file"), "metrics")
    secret = read_fleet_secret(config.secret_file, "--secret-file")
    fleet_key = None if secret is None else FleetKey(secret)
    signers = WorkerSigners(fleet_key)
    tls = _tls(config.listen)
    keys = ApiKeys(config.key, config.tenant)
    _say_free_budgets(config)
    losses = LostBlocks(clock)
    deciding = routing_classes(config, losses)
    fleet, load_book, indexes, router = deciding.fleet, deciding.load_book, deciding.indexes, deciding.router
    doctor = CacheDoctor(losses, StableJson(config.proxy.volatile_line))
    misses = MissTotals(PriceList(config.price), config.meter.currency, time.time())
    metrics, state, key_makers = (
        GatewayMetrics(),
        GatewayState(),
        PrefixKeyMakers(volatile_lines=config.proxy.volatile_line),
    )
    worker_keys = _worker_api_keys(config)
    upstreams = Upstreams(api_keys=worker_keys, signers=signers)
    moves = Moves(fleet, upstreams, clock, resuming_dialects())
    duties = Duties(fleet, moves, clock)
    other_work = OtherWork(load_book, name)
    watchers = Watchers(
        fleet,
        indexes,
        key_makers,
        WatchSettings(tokenize=config.routing.tokenize),
        signers=signers,
        api_keys=worker_keys,
        clock=clock,
        on_lost=upstreams.cut,
        on_moving=duties.saw_moving,
        on_role=duties.saw_role,
        other_work=other_work,
    )
    hints = HandoffHints(watchers.info)
    services = ProxyServices(fleet, upstreams, config.proxy, metrics, CleanupTasks(), clock, doctor, moves, hints, name)
    proxy = Proxy(
        router, services, resume_grace_s=config.proxy.resume_grace_s, debug_routes=config.routing.debug_routes
    )
    errors = TaskErrors()
    membership = Membership(fleet, load_book, watchers, upstreams, moves, clock, errors=errors)
    location = config.store_location
    store = None if location is None else location.open()
    prices = PriceList(config.price)
    meter = _meter(config, location, store, prices, keys)
    threads = None if store is None else StoreThreads(store)
    key_watch = NoKeyWatch() if threads is None else KeyWatch(keys, threads, errors)
    leases = NoLeases() if threads is None else LimitLeases(threads, meter.identity, clock, errors=errors)
    request_log = RequestLog() if config.log_requests else NoRequestLog()
    tracing = make_tracing(config.tracing)
    admission = _admission(config, fleet, state, meter, clock, leases, prices)
    flex = _flex(config, fleet, other_work, clock)
    scaling = _scaling(config, fleet, load_book, admission, metrics, duties, clock, errors)
    status = partial(_status, config, store, state, admission, meter, clock, clock())
    view = AdminView(
        fleet, load_book, router, admission, membership, duties, scaling.wishes, clock, status, misses.report
    )
    group = ProcessGroup(
        config.process,
        config.process_ports,
        [None if fleet_key is None else RequestSigner(fleet_key) for _ in config.process_ports],
    )
    aliases = ModelAliases(
        {one.name: one.model for one in config.alias if one.share == 1},
        {one.name: (one.model, one.share) for one in config.alias if one.share < 1},
    )
    canaries = CanaryWatch(
        {
            one.name: CanaryShare(one.model, aliases.without_canary(one.name), one.share)
            for one in config.alias
            if one.share < 1
        },
        config.canary,
        aliases.stop_canary,
    )
    model_of = partial(requested_model, fleet=fleet, aliases=aliases)
    objects = _objects(config, threads, keys, name, model_of, errors)
    cors = CorsRules(config.listen.cors_origin)
    gauges = partial(
        read_fleet_gauges, fleet, load_book, clock, lambda: state.num_running, lambda: admission.num_waiting
    )
    goals = LatencyGoals(1e3 * config.autoscale.ttft_s, 1e3 * config.autoscale.itl_s)
    insight = InsightBook(
        metrics,
        prices,
        goals,
        gauges,
        canaries,
        currency=config.meter.currency,
        has_prices=bool(config.price),
        process=config.process,
    )
    live = LiveStream(admin_token, insight, errors)
    kv_pages = KvPages(fleet, insight.reuse, watchers.metrics_page, clock)
    gateway = Gateway(
        GatewayParts(
            fleet=fleet,
            indexes=indexes,
            proxy=proxy,
            keys=keys,
            admission=admission,
            flex=flex,
            key_makers=key_makers,
            meter=meter,
            request_log=request_log,
            metrics=metrics,
            recorder=deciding.recorder,
            twin=make_twin(config.twin, fleet, metrics, clock),
            tracing=tracing,
            state=state,
            admin=GroupEndpoint(AdminEndpoint(admin_token, view, threads), group),
            metrics_page=GroupMetrics(
                MetricsEndpoint(metrics, (admin_token, metrics_token), is_open=lambda: not keys.required), group
            ),
            usage=UsageEndpoint(store, keys, admin_token, currency=config.meter.currency),
            registration=GroupEndpoint(RegistrationEndpoint(fleet_key, fleet, membership), group),
            tokenize=TokenizeEndpoint(fleet, upstreams, keys, admission, config.proxy, clock, aliases),
            embeddings=EmbeddingsEndpoint(
                fleet,
                load_book,
                upstreams,
                keys,
                admission,
                flex,
                meter,
                partial(_ended, metrics, request_log),
                config.proxy,
                clock,
                aliases,
            ),
            doctor=doctor,
            misses=misses,
            objects=objects,
            insight=insight,
            insight_pages=GroupEndpoint(InsightEndpoint(admin_token, insight, kv_pages), group),
            live=live,
            pages=StaticPages(),
            hidden_tokens=config.meter.hidden_tokens,
            max_model_tokens=partial(_max_model_tokens, fleet, watchers),
            store_works=lambda: store is None or store.trouble is None,
            cors=cors,
            aliases=aliases,
            clock=clock,
        )
    )
    limits = _server_limits(config.listen)
    gate = FrontGate(
        keys,
        metrics,
        max_body_bytes=limits.max_body_bytes,
        max_public_body_bytes=int(config.listen.max_public_body_kib * (1 << 10)),
        max_public_per_s=config.listen.max_public_requests_per_s,
        clock=clock,
        cors=cors,
    )
    server = Server(gateway.handle, limits, on_bad=gateway.count_bad_request, gate=gate)
    add_gauges(metrics, fleet, load_book, indexes, admission, meter, server, state)
    add_flex_gauges(metrics, flex)
    add_task_counters(metrics, errors)
    if store is not None:
        add_store_gauges(metrics, store)
    return GatewayServer(
        config=config,
        server=server,
        state=state,
        fleet=fleet,
        membership=membership,
        proxy=proxy,
        key_makers=key_makers,
        group=group,
        keys=keys,
        store=threads,
        gateway=gateway,
        objects=objects,
        key_watch=key_watch,
        leases=leases,
        retention=Retention(threads, config.meter.keep_days, errors=errors),
        scaling=scaling,
        meter=meter,
        metrics=metrics,
        deciding=deciding,
        request_log=request_log,
        tracing=tracing,
        live=live,
        tls=tls,
    )


def _say_free_budgets(config: GatewayConfig) -> None:
    limited = [key.name for key in config.key if key.budget is not None or key.session_budget is not None]
    if limited and not config.price:
        hint = "budgets are charged by prices: add [[price]] tables"
        log.warning("budget_without_price", keys=limited[:16], hint=hint)


def _ended(metrics: GatewayMetrics, request_log: RequestLog | NoRequestLog, row: UsageRow) -> None:
    metrics.ended(row)
    request_log.record(row)


def _max_model_tokens(fleet: Fleet, watchers: Watchers, model: str) -> int | None:
    """Return the smallest context length among the Stoker workers of a model; other engines do not report it here."""
    infos = [watchers.info(member.worker_id) for member in fleet.models().get(model, [])]
    return min((info.max_model_tokens for info in infos if info is not None), default=None)


def _scaling(
    config: GatewayConfig,
    fleet: Fleet,
    load_book: LoadBook,
    admission: Admission,
    metrics: GatewayMetrics,
    duties: Duties,
    clock: Callable[[], float],
    errors: TaskErrors,
) -> Scaling:
    """Return the autoscaler. Of several processes, only the first one decides."""
    settings = config.autoscale if config.process == 0 else replace(config.autoscale, mode="off")
    board = ScaleBoard(clock, secrets.token_hex(8))
    sampler = FleetSampler(fleet, load_book, admission, metrics.ttft_s)
    return Scaling(settings, sampler, duties, board, board, clock, errors)


def _flex(config: GatewayConfig, fleet: Fleet, other_work: OtherWork, clock: Callable[[], float]) -> FlexGate:
    capacities = Capacities(fleet, config.admission)

    def num_workers(lane: str) -> int:
        return len(fleet.models().get(lane, ()))

    def others(lane: str) -> OtherLoad:
        members = fleet.models().get(lane, ())
        return reduce(OtherLoad.plus, (other_work.load(member.worker_id) for member in members), NO_OTHERS)

    def lane_of(model: str) -> str | None:
        return capacities.lane(model, clock())

    flex = FlexGate(config.flex, lane=lane_of, num_workers=num_workers, clock=clock, others=others)
    other_work.on_interactive = flex.other_began
    return flex


def _objects(
    config: GatewayConfig,
    threads: StoreThreads | None,
    keys: ApiKeys,
    name: str,
    model_of: Callable[[str | None], str],
    errors: TaskErrors,
) -> TenantObjects | NoObjects:
    if threads is None:
        return NoObjects()
    max_body_bytes = int(config.listen.max_body_mib * (1 << 20))
    return TenantObjects(
        threads,
        keys,
        config.responses,
        config.batch,
        name=name,
        max_body_bytes=max_body_bytes,
        model_of=model_of,
        errors=errors,
    )


def gateway_name() -> str:
    """Return a name for this process that no other gateway has."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"


def _meter(
    config: GatewayConfig,
    location: StoreLocation | None,
    store: Store | None,
    prices: PriceList,
    keys: ApiKeys,
) -> Meter | NoMeter:
    if location is None or store is None:
        return NoMeter()
    return Meter(store, location.slots_path, config.meter, prices, partial(_budgets_of, keys))


def _budgets_of(keys: ApiKeys, row: UsageRow) -> list[str]:
    key = keys.settings_of(row.key_id)
    return [] if key is None else spent_names(key, row.session, row.time_s)


def _admission(
    config: GatewayConfig,
    fleet: Fleet,
    state: GatewayState,
    meter: Meter | NoMeter,
    clock: Callable[[], float],
    leases: LimitLeases | NoLeases,
    prices: PriceList,
) -> Admission:
    capacities = Capacities(fleet, config.admission)
    gate = partial(_refusal, state, meter)
    return Admission(
        config.admission,
        capacities.capacity,
        clock=clock,
        lane=capacities.lane,
        gate=gate,
        leases=leases,
        price=prices.price,
    )


def _status(
    config: GatewayConfig,
    store: WatchedStore | None,
    state: GatewayState,
    admission: Admission,
    meter: Meter | NoMeter,
    clock: Callable[[], float],
    started_s: float,
) -> GatewayStatus:
    """Return the answer to GET /admin/status."""
    return GatewayStatus(
        version=stoker.__version__,
        uptime_s=round(clock() - started_s, 1),
        process=config.process,
        processes=max(1, len(config.process_ports)),
        draining=state.draining,
        running_requests=state.num_running,
        waiting_requests=admission.num_waiting,
        policy=config.routing.policy,
        store=None if store is None else store.name,
        store_trouble=None if store is None else store.trouble,
        ledger_pending_rows=meter.pending,
    )


def _server_limits(listen: ListenSettings) -> ServerLimits:
    return ServerLimits(
        max_body_bytes=int(listen.max_body_mib * (1 << 20)),
        max_held_bytes=int(listen.held_body_mib * (1 << 20)),
        max_connections=listen.max_connections,
        max_connections_per_address=listen.connections_per_address,
        trusted_addresses=listen.trusted_addresses,
    )


def _refusal(state: GatewayState, meter: Meter | NoMeter) -> Overloaded | None:
    """Return the reason to refuse all new requests, or None."""
    refusal = meter.refusal()
    if refusal is not None:
        return refusal
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


def _worker_api_keys(config: GatewayConfig) -> dict[str, str]:
    """Return the API keys that the gateway sends to workers, by worker URL."""
    keys = {one.url.rstrip("/"): read_secret(one.api_key_file, "api_key_file") for one in config.worker}
    return {url: key for url, key in keys.items() if key is not None}
