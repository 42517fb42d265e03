"""A gateway with its real parts and mock workers in one event loop. Only the clock and the prefix keys are test doubles.

`clock` does not move until a test moves it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mocks import MockWorker, Script
from waiting import LONG_S, until

from stoker.base.clock import VirtualClock
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook, LoadTotals
from stoker.fleet.lost_blocks import LostBlocks
from stoker.fleet.spec import Role, WorkerSpec
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.admission_settings import AdmissionSettings, FlexSettings
from stoker.gateway.admission.api_keys import ApiKeys
from stoker.gateway.admission.fair_queue import Capacity
from stoker.gateway.admission.flex import FlexGate
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.api.client_body import RequestEnvelope
from stoker.gateway.api.reply import Reply, json_reply
from stoker.gateway.doctor.cache_doctor import CacheDoctor
from stoker.gateway.doctor.miss_totals import MissTotals
from stoker.gateway.http import ClientLimits, ConnectionPool, HttpRequest, Origin, Server, ServerLimits, WorkerResponse
from stoker.gateway.insight.canary_watch import no_canaries
from stoker.gateway.insight.fleet_gauges import read_fleet_gauges
from stoker.gateway.insight.insight_book import InsightBook
from stoker.gateway.insight.latency_goals import LatencyGoals
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.objects.tenant_objects import NoObjects
from stoker.gateway.path.app import Gateway
from stoker.gateway.path.dialects.dialect import resuming_dialects
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.path.embeddings import EmbeddingsEndpoint
from stoker.gateway.path.front_gate import FrontGate
from stoker.gateway.path.gateway_parts import GatewayParts
from stoker.gateway.path.handoff_hints import HandoffHints
from stoker.gateway.path.model_aliases import ModelAliases
from stoker.gateway.path.moves import Moves
from stoker.gateway.path.proxy import Proxy
from stoker.gateway.path.proxy_settings import ProxySettings
from stoker.gateway.path.services import CleanupTasks, ProxyServices
from stoker.gateway.path.tokenize import TokenizeEndpoint
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.prefix.conversation_keys import ConversationKeys
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.records.metrics_endpoint import MetricsEndpoint
from stoker.gateway.records.running_usage import RunningUsage
from stoker.gateway.records.tracing import NoTracing, Tracing
from stoker.gateway.records.usage_row import UsageHead, UsageRow
from stoker.gateway.twin_watch import NoTwin
from stoker.gateway.ui.static_pages import StaticPages
from stoker.replay.recorder import NoRecorder
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

NOTHING = LoadTotals(0, 0, 0, 0)
PATIENT = ProxySettings(connect_s=LONG_S)


@dataclass
class KeysDouble:
    """Prefix keys for tests: every prompt has the same length, and no two share a prefix."""

    num_tokens: int = 10

    async def keys(self, model: str, envelope: RequestEnvelope, salt: str | None, tenant: str) -> ConversationKeys:
        return self.keys_now(model, envelope, salt)

    def keys_now(self, model: str, envelope: RequestEnvelope, salt: str | None) -> ConversationKeys:
        return ConversationKeys((), 16, self.num_tokens)


@dataclass
class Rows:
    rows: list[UsageRow] = field(default_factory=list)

    def record(self, row: UsageRow) -> None:
        self.rows.append(row)

    def open(self, head: UsageHead) -> RunningUsage:
        return RunningUsage()

    def settle(self, running: RunningUsage, row: UsageRow) -> None:
        self.rows.append(row)


class Nothing:
    async def answer(self, request: HttpRequest) -> Reply:
        return json_reply({"part": request.path.decode()})


@dataclass
class Got:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class World:
    def __init__(
        self,
        *,
        policy: str = "round_robin",
        prompt_tokens: int = 10,
        proxy: ProxySettings | None = None,
        resume_grace_s: float = 2.0,
        debug_routes: bool = False,
        keys: Sequence[KeySettings] = (),
        hints: HandoffHints | None = None,
        tracing: Tracing | None = None,
        key_makers: KeysDouble | None = None,
    ) -> None:
        self.fleet = Fleet()
        self.ledger = LoadBook()
        self.workers: dict[str, MockWorker] = {}
        self.rows = Rows()
        self.metrics = GatewayMetrics()
        self.state = GatewayState()
        self.clock = VirtualClock(start_s=1000.0)
        clock = self.clock.now
        losses = LostBlocks(clock)
        self.indexes = indexes = PrefixIndexes(losses=losses)
        doctor = CacheDoctor(losses)
        self.misses = MissTotals(PriceList(), "USD", 0.0)
        router = Router(self.fleet, self.ledger, indexes, settings=RouterSettings(policy=policy))
        self.upstreams = Upstreams()
        self.moves = Moves(self.fleet, self.upstreams, clock, resuming_dialects())
        services = ProxyServices(
            self.fleet,
            self.upstreams,
            proxy or PATIENT,
            self.metrics,
            CleanupTasks(),
            clock,
            doctor,
            self.moves,
            hints or HandoffHints(),
        )
        gauges = partial(read_fleet_gauges, self.fleet, self.ledger, clock, lambda: 0, lambda: 0)
        self.insight = InsightBook(self.metrics, PriceList(), LatencyGoals(), gauges, no_canaries())
        self.proxy = Proxy(router, services, resume_grace_s=resume_grace_s, debug_routes=debug_routes)
        self.admission = Admission(
            AdmissionSettings(), lambda model, now: Capacity(), clock=clock, gate=self.state.refusal
        )
        self.flex = FlexGate(FlexSettings(), lane=lambda model: model, num_workers=lambda lane: 1, clock=clock)
        api_keys = ApiKeys(keys)
        self.max_model_tokens: dict[str, int] = {}
        self.gateway = Gateway(
            GatewayParts(
                fleet=self.fleet,
                indexes=indexes,
                proxy=self.proxy,
                keys=api_keys,
                admission=self.admission,
                flex=self.flex,
                key_makers=key_makers or KeysDouble(prompt_tokens),
                meter=self.rows,
                request_log=Rows(),
                metrics=self.metrics,
                tracing=tracing or NoTracing(),
                state=self.state,
                admin=Nothing(),
                metrics_page=MetricsEndpoint(self.metrics, (), is_open=lambda: not keys),
                usage=Nothing(),
                registration=Nothing(),
                tokenize=TokenizeEndpoint(
                    self.fleet, self.upstreams, api_keys, self.admission, proxy or PATIENT, clock
                ),
                embeddings=EmbeddingsEndpoint(
                    self.fleet,
                    self.ledger,
                    self.upstreams,
                    api_keys,
                    self.admission,
                    self.flex,
                    self.rows,
                    self.metrics.ended,
                    proxy or PATIENT,
                    clock,
                    ModelAliases({"text-embedding-3-small": "m"}),
                ),
                doctor=doctor,
                misses=self.misses,
                recorder=NoRecorder(),
                twin=NoTwin(),
                canaries=no_canaries(),
                objects=NoObjects(),
                insight=self.insight,
                insight_pages=Nothing(),
                live=Nothing(),
                pages=StaticPages(),
                hidden_tokens=1000,
                max_model_tokens=self.max_model_tokens.get,
                clock=clock,
            )
        )
        self.gate = FrontGate(
            api_keys,
            self.metrics,
            max_body_bytes=64 << 20,
            max_public_body_bytes=64 << 10,
            max_public_per_s=500,
            clock=self.clock.now,
        )
        self.server = Server(self.gateway.handle, ServerLimits(), on_bad=self.gateway.count_bad_request, gate=self.gate)

    def change(self, **parts: Any) -> None:
        """Give the gateway other parts."""
        old = self.gateway._parts
        Gateway.__init__(self.gateway, GatewayParts(**{name: getattr(old, name) for name in old.__slots__} | parts))

    async def __aenter__(self) -> World:
        await self.server.listen("127.0.0.1", 0)
        self.client = ConnectionPool(Origin("http", "127.0.0.1", self.server.port), ClientLimits())
        return self

    async def __aexit__(self, *why: object) -> None:
        self.client.close()
        await self.server.close(0.5)
        await self.moves.close()
        await self.proxy.close()
        for worker in self.workers.values():
            await worker.stop()

    async def add(
        self, name: str, script: Script, *, role: Role = Role.UNIFIED, dialect: str = "openai", **more: Any
    ) -> MockWorker:
        worker = self.workers[name] = MockWorker(script, name)
        await worker.start()
        self.register(name, role=role, dialect=dialect, **more)
        return worker

    def register(self, name: str, *, role: Role = Role.UNIFIED, dialect: str = "openai", **more: Any) -> None:
        url = self.workers[name].url
        spec = WorkerSpec(worker_id=WorkerId(name), url=url, role=role, dialect=dialect, models=("m",), **more)
        self.fleet.add(spec, self.clock.now())

    async def send(
        self,
        body: bytes | dict[str, Any],
        path: str = "/v1/chat/completions",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> WorkerResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.send(b"POST", path.encode(), headers, data, connect_s=LONG_S, head_s=LONG_S)

    async def ask(
        self,
        body: bytes | dict[str, Any],
        path: str = "/v1/chat/completions",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> Got:
        return await _got(await self.send(body, path, headers))

    async def get(self, path: str) -> Got:
        return await _got(await self.client.send(b"GET", path.encode(), (), b"", connect_s=LONG_S, head_s=LONG_S))

    async def settled(self) -> UsageRow:
        """Wait until one request has ended: nothing is reserved, and its one row is recorded."""
        await until(lambda: self.ledger.totals() == NOTHING and not self.state.num_running and bool(self.rows.rows))
        assert self.admission.num_in_flight == 0
        [row] = self.rows.rows
        return row


async def _got(answer: WorkerResponse) -> Got:
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Got(answer.status, headers, await answer.read(1 << 24))
