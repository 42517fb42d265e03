"""GatewayParts: the components that `Gateway` puts together, and what it needs of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker.fleet.fleet import Fleet
from stoker.fleet.prefix_index import PrefixIndex
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.admission.flex import FlexGate
from stoker.gateway.api.client_body import RequestEnvelope
from stoker.gateway.api.endpoint import Endpoint
from stoker.gateway.api.reply import Reply
from stoker.gateway.doctor.cache_doctor import CacheDoctor
from stoker.gateway.doctor.miss_parts import MissPart
from stoker.gateway.http import HttpRequest
from stoker.gateway.insight.request_digest import RequestTimes
from stoker.gateway.objects.response_runs import Generate
from stoker.gateway.path.call import Call
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.path.embeddings import EmbeddingsEndpoint
from stoker.gateway.path.model_aliases import NO_ALIASES, ModelAliases
from stoker.gateway.path.proxy import Proxy
from stoker.gateway.path.tokenize import TokenizeEndpoint
from stoker.gateway.prefix.conversation_keys import ConversationKeys
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.records.running_usage import UsageLedger
from stoker.gateway.records.tracing import Tracing
from stoker.gateway.records.usage_row import UsageRow
from stoker.proto.cors import NO_CORS, CorsRules
from stoker.replay.recorder import NoRecorder, Recorder
from stoker.routing.query import Route, RouteQuery


class ConversationKeySource(Protocol):
    """Computes the prefix keys of a request's conversation."""

    def keys_now(self, model: str, envelope: RequestEnvelope, salt: str | None) -> ConversationKeys | None:
        """Return the keys, or None if computing them would block the event loop too long; then call `keys`."""

    async def keys(self, model: str, envelope: RequestEnvelope, salt: str | None, tenant: str) -> ConversationKeys: ...


class PrefixIndexLookup(Protocol):
    """Finds the prefix index of a model."""

    def get(self, model: str) -> PrefixIndex | None: ...


class UsageRecorder(Protocol):
    """Takes one row for each finished request: the request log."""

    def record(self, row: UsageRow) -> None: ...


class MissRecorder(Protocol):
    """Counts why prompts were computed."""

    def add(
        self, key_id: str, tenant: str, model: str, prompt_tokens: int, cached_tokens: int, parts: Sequence[MissPart]
    ) -> None: ...


class RequestInsight(Protocol):
    """Collects ended requests for the dashboard."""

    def ended(
        self, row: UsageRow, route: Route | None, query: RouteQuery | None, times: RequestTimes, num_retries: int
    ) -> None: ...


class CanaryObserver(Protocol):
    """Told of every request that ended and did not wait for idle workers, with the model name that the client used."""

    def ended(self, name: str | None, row: UsageRow) -> None: ...


class StreamEndpoint(Protocol):
    """An endpoint that sends its answer itself, and returns a reply only to refuse a request."""

    async def answer(self, request: HttpRequest) -> Reply | None: ...


class StoredObjects(Protocol):
    """What tenants keep in the store: responses, files and batches, or nothing."""

    async def create_response(self, request: HttpRequest, generate: Generate) -> None: ...

    async def answer(self, request: HttpRequest) -> Reply | None: ...

    async def counted_body(self, caller: Caller, body: bytes) -> bytes:
        """Return the body of a request that counts input tokens, with the stored conversation that it continues."""


class CallObserver(Protocol):
    """Told of every request that ended."""

    def ended(self, call: Call) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """The components that a gateway is built from. `build.py` creates them."""

    fleet: Fleet
    indexes: PrefixIndexLookup
    proxy: Proxy
    keys: ApiKeys
    admission: Admission
    flex: FlexGate
    key_makers: ConversationKeySource
    meter: UsageLedger
    request_log: UsageRecorder
    metrics: GatewayMetrics
    recorder: Recorder | NoRecorder
    twin: CallObserver
    canaries: CanaryObserver
    tracing: Tracing
    state: GatewayState
    admin: Endpoint
    metrics_page: Endpoint
    usage: Endpoint
    registration: Endpoint
    tokenize: TokenizeEndpoint
    embeddings: EmbeddingsEndpoint
    doctor: CacheDoctor
    misses: MissRecorder
    objects: StoredObjects
    insight: RequestInsight
    insight_pages: Endpoint
    live: StreamEndpoint
    pages: Endpoint
    hidden_tokens: int  # `meter.hidden_tokens`
    max_model_tokens: Callable[[str], int | None]  # a model's context length, if known
    store_works: Callable[[], bool] = lambda: True
    cors: CorsRules = NO_CORS
    aliases: ModelAliases = NO_ALIASES
    clock: Callable[[], float]
