"""Builds a gateway from its settings: creates every component once and connects them.

The four files `build_*.py` create the parts; this one adds the endpoints and the server. `build_gateway` opens only the store.
`GatewayServer.start` listens and begins to watch the workers; `close` stops everything.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

import stoker
from stoker.base.errors import ConfigError
from stoker.base.fleet_key import FleetKey, read_fleet_secret
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors
from stoker.gateway.admin import AdminEndpoint, AdminView
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.api_keys import AdminToken, ApiKeys
from stoker.gateway.build_capacity_parts import build_capacity_parts
from stoker.gateway.build_durable_parts import DurableParts, build_durable_parts
from stoker.gateway.build_insight_parts import build_insight_parts
from stoker.gateway.build_worker_side import build_worker_side
from stoker.gateway.config import GatewayConfig, read_secrets
from stoker.gateway.doctor.miss_totals import MissTotals
from stoker.gateway.gateway_server import GatewayServer
from stoker.gateway.gauges import add_flex_gauges, add_gauges, add_store_gauges, add_task_counters
from stoker.gateway.http import Server, ServerLimits
from stoker.gateway.joined_answers import admin_joins
from stoker.gateway.listen_settings import ListenSettings
from stoker.gateway.path.app import Gateway
from stoker.gateway.path.call import requested_model
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.path.embeddings import EmbeddingsEndpoint
from stoker.gateway.path.front_gate import FrontGate
from stoker.gateway.path.gateway_parts import GatewayParts
from stoker.gateway.path.model_aliases import ModelAliases
from stoker.gateway.path.tokenize import TokenizeEndpoint
from stoker.gateway.processes import GroupEndpoint, GroupMetrics, ProcessGroup
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.records.metrics_endpoint import MetricsEndpoint
from stoker.gateway.records.request_log import NoRequestLog, RequestLog
from stoker.gateway.records.tracing import make_tracing
from stoker.gateway.records.usage_endpoint import UsageEndpoint
from stoker.gateway.records.usage_row import UsageRow
from stoker.gateway.twin_watch import make_twin
from stoker.gateway.ui.static_pages import StaticPages
from stoker.gateway.upgrades import UpgradeBoard
from stoker.gateway.watch.registration import RegistrationEndpoint
from stoker.proto.admin_api import GatewayStatus
from stoker.proto.cors import CorsRules
from stoker.proto.signed_http import RequestSigner

log = EventLog("gateway")


def build_gateway(config: GatewayConfig) -> GatewayServer:
    """Create all components of a gateway. Opens the store, but no sockets of its own."""
    clock, name, errors = time.monotonic, gateway_name(), TaskErrors()
    metrics, state = GatewayMetrics(), GatewayState()
    admin_token = AdminToken(read_secrets(config.admin_token_file, "admin_token_file"))
    metrics_token = AdminToken(read_secrets(config.metrics_token_file, "metrics_token_file"), "metrics")
    secret = read_fleet_secret(config.secret_file, "--secret-file")
    fleet_key = None if secret is None else FleetKey(secret)
    tls = _tls(config.listen)
    keys = ApiKeys(config.key, config.tenant)
    _say_free_budgets(config)
    workers = build_worker_side(config, fleet_key, metrics, name, clock, errors)
    fleet = workers.fleet
    twin = make_twin(config.twin, fleet, metrics, clock)  # a wrong calibration is refused before the store is opened
    aliases = ModelAliases(
        {one.name: one.model for one in config.alias if one.share == 1},
        {one.name: (one.model, one.share) for one in config.alias if one.share < 1},
    )
    model_of = partial(requested_model, fleet=fleet, aliases=aliases)
    durable = build_durable_parts(config, keys, model_of, name, clock, errors)
    request_log = RequestLog() if config.log_requests else NoRequestLog()
    tracing = make_tracing(config.tracing)
    capacity = build_capacity_parts(config, workers, durable, state, metrics, clock, errors)
    admission, flex = capacity.admission, capacity.flex
    group = ProcessGroup(
        config.process,
        config.process_ports,
        [None if fleet_key is None else RequestSigner(fleet_key) for _ in config.process_ports],
    )
    insight = build_insight_parts(
        config, workers, admission, durable.prices, state, metrics, aliases, admin_token, group, clock, errors
    )
    misses = MissTotals(durable.prices, config.meter.currency, time.time())
    view = AdminView(
        fleet,
        workers.load_book,
        workers.deciding.router,
        admission,
        workers.membership,
        workers.duties,
        UpgradeBoard(clock, secrets.token_hex(8)),
        capacity.scaling.wishes,
        clock,
        partial(_status, config, durable, state, admission, clock, clock()),
        misses.report,
    )
    cors = CorsRules(config.listen.cors_origin)
    gateway = Gateway(
        GatewayParts(
            fleet=fleet,
            indexes=workers.deciding.indexes,
            proxy=workers.proxy,
            keys=keys,
            admission=admission,
            flex=flex,
            key_makers=workers.key_makers,
            meter=durable.meter,
            request_log=request_log,
            metrics=metrics,
            recorder=workers.deciding.recorder,
            twin=twin,
            canaries=insight.book.canaries,
            tracing=tracing,
            state=state,
            admin=GroupEndpoint(AdminEndpoint(admin_token, view, durable.threads), group, admin_joins()),
            metrics_page=GroupMetrics(
                MetricsEndpoint(metrics, (admin_token, metrics_token), is_open=lambda: not keys.required), group
            ),
            usage=UsageEndpoint(durable.store, keys, admin_token, currency=config.meter.currency),
            registration=GroupEndpoint(RegistrationEndpoint(fleet_key, fleet, workers.membership), group),
            tokenize=TokenizeEndpoint(fleet, workers.upstreams, keys, admission, config.proxy, clock, aliases),
            embeddings=EmbeddingsEndpoint(
                fleet,
                workers.load_book,
                workers.upstreams,
                keys,
                admission,
                flex,
                durable.meter,
                partial(_ended, metrics, request_log),
                config.proxy,
                clock,
                aliases,
            ),
            doctor=workers.doctor,
            misses=misses,
            objects=durable.objects,
            insight=insight.book,
            insight_pages=insight.pages,
            live=insight.live,
            pages=StaticPages(),
            hidden_tokens=config.meter.hidden_tokens,
            max_model_tokens=workers.max_model_tokens,
            store_works=lambda: durable.works,
            cors=cors,
            aliases=aliases,
            clock=clock,
        )
    )
    server = _server(config.listen, gateway, keys, metrics, cors, clock)
    add_gauges(metrics, fleet, workers.load_book, workers.deciding.indexes, admission, durable.meter, server, state)
    add_flex_gauges(metrics, flex)
    add_task_counters(metrics, errors)
    if durable.store is not None:
        add_store_gauges(metrics, durable.store)
    return GatewayServer(
        config=config,
        server=server,
        state=state,
        fleet=fleet,
        membership=workers.membership,
        proxy=workers.proxy,
        key_makers=workers.key_makers,
        group=group,
        keys=keys,
        store=durable.threads,
        gateway=gateway,
        objects=durable.objects,
        key_watch=durable.key_watch,
        leases=durable.leases,
        retention=durable.retention,
        scaling=capacity.scaling,
        meter=durable.meter,
        metrics=metrics,
        deciding=workers.deciding,
        request_log=request_log,
        tracing=tracing,
        live=insight.live,
        tls=tls,
    )


def _server(
    listen: ListenSettings,
    gateway: Gateway,
    keys: ApiKeys,
    metrics: GatewayMetrics,
    cors: CorsRules,
    clock: Callable[[], float],
) -> Server:
    """Return the HTTP server. `FrontGate` authenticates a request before its body is kept."""
    limits = _server_limits(listen)
    gate = FrontGate(
        keys,
        metrics,
        max_body_bytes=limits.max_body_bytes,
        max_public_body_bytes=int(listen.max_public_body_kib * (1 << 10)),
        max_public_per_s=listen.max_public_requests_per_s,
        clock=clock,
        cors=cors,
    )
    return Server(gateway.handle, limits, on_bad=gateway.count_bad_request, gate=gate)


def _say_free_budgets(config: GatewayConfig) -> None:
    limited = [key.name for key in config.key if key.budget is not None or key.session_budget is not None]
    if limited and not config.price:
        hint = "budgets are charged by prices: add [[price]] tables"
        log.warning("budget_without_price", keys=limited[:16], hint=hint)


def _ended(metrics: GatewayMetrics, request_log: RequestLog | NoRequestLog, row: UsageRow) -> None:
    metrics.ended(row)
    request_log.record(row)


def gateway_name() -> str:
    """Return a name for this process that no other gateway has."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"


def _status(
    config: GatewayConfig,
    durable: DurableParts,
    state: GatewayState,
    admission: Admission,
    clock: Callable[[], float],
    started_s: float,
) -> GatewayStatus:
    """Return the answer to GET /admin/status."""
    store = durable.store
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
        ledger_pending_rows=durable.meter.pending,
    )


def _server_limits(listen: ListenSettings) -> ServerLimits:
    return ServerLimits(
        max_body_bytes=int(listen.max_body_mib * (1 << 20)),
        max_held_bytes=int(listen.held_body_mib * (1 << 20)),
        max_connections=listen.max_connections,
        max_connections_per_address=listen.connections_per_address,
        trusted_addresses=listen.trusted_addresses,
    )


def _tls(listen: ListenSettings) -> ssl.SSLContext | None:
    if listen.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listen.tls_cert, listen.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"listen.tls_cert={listen.tls_cert}, listen.tls_key={listen.tls_key}: {error}") from error
    return context
