"""Builds the part of a gateway that the dashboard reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from stoker.base.long_task import TaskErrors
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.api_keys import AdminToken
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.build_worker_side import WorkerSide
from stoker.gateway.config import GatewayConfig
from stoker.gateway.insight.canary_watch import CanaryShare, CanaryWatch
from stoker.gateway.insight.fleet_gauges import read_fleet_gauges
from stoker.gateway.insight.insight_book import InsightBook
from stoker.gateway.insight.insight_endpoint import InsightEndpoint
from stoker.gateway.insight.kv_pages import KvPages
from stoker.gateway.insight.latency_goals import LatencyGoals
from stoker.gateway.insight.live_stream import LiveStream
from stoker.gateway.joined_answers import insight_joins
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.path.model_aliases import ModelAliases
from stoker.gateway.processes import GroupEndpoint, ProcessGroup, RedirectedRequest
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.proto.admin_api import ADMIN_NOW_PATH


@dataclass(frozen=True, slots=True)
class InsightParts:
    """The components of the dashboard."""

    book: InsightBook
    pages: GroupEndpoint
    live: LiveStream


def build_insight_parts(
    config: GatewayConfig,
    workers: WorkerSide,
    admission: Admission,
    prices: PriceList,
    state: GatewayState,
    metrics: GatewayMetrics,
    aliases: ModelAliases,
    admin_token: AdminToken,
    group: ProcessGroup,
    clock: Callable[[], float],
    errors: TaskErrors,
) -> InsightParts:
    fleet = workers.fleet
    canaries = CanaryWatch(
        {
            one.name: CanaryShare(one.model, aliases.without_canary(one.name), one.share)
            for one in config.alias
            if one.share < 1
        },
        config.canary,
        aliases.stop_canary,
    )
    gauges = partial(
        read_fleet_gauges, fleet, workers.load_book, clock, lambda: state.num_running, lambda: admission.num_waiting
    )
    goals = LatencyGoals(1e3 * config.autoscale.ttft_s, 1e3 * config.autoscale.itl_s)
    book = InsightBook(
        metrics,
        prices,
        goals,
        gauges,
        canaries,
        currency=config.meter.currency,
        has_prices=bool(config.price),
        process=config.process,
    )
    kv_pages = KvPages(fleet, book.reuse, workers.watchers.metrics_page, clock)
    pages = GroupEndpoint(
        InsightEndpoint(admin_token, book, kv_pages), group, insight_joins(book.show_now, book.show_series)
    )
    return InsightParts(book, pages, LiveStream(admin_token, book, partial(_read_now, pages), errors))


async def _read_now(pages: GroupEndpoint, viewer: EndpointRequest) -> bytes | None:
    """Return the state of all processes of the gateway, or None if the viewer's token is not valid any more."""
    reply = await pages.answer(RedirectedRequest(viewer, ADMIN_NOW_PATH.encode()))
    return reply.body if reply.status == 200 else None
