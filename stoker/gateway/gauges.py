"""The gauges of /metrics that are read from other components: fleet, load book, indexes, admission, meter, server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from stoker.base.long_task import TaskErrors
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.load_book import LoadBook, WorkerLoad
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.flex import FlexGate
from stoker.gateway.http import Server
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.records.meter import Meter, NoMeter
from stoker.gateway.records.metrics import GatewayMetrics, Sample
from stoker.gateway.store.watched import WatchedStore
from stoker.routing.router import PrefixIndexes


def add_gauges(
    metrics: GatewayMetrics,
    fleet: Fleet,
    load_book: LoadBook,
    indexes: PrefixIndexes,
    admission: Admission,
    meter: Meter | NoMeter,
    server: Server,
    state: GatewayState,
) -> None:
    """Add the metrics whose values are read from other components when /metrics is read."""

    def of_workers(read: Callable[[Member, float], float]) -> Iterator[Sample]:
        now = time.monotonic()
        return (((("worker", str(member.worker_id)),), float(read(member, now))) for member in fleet.members())

    def usable(member: Member, now: float) -> float:
        return member.health.usable(now)

    def load(member: Member, now: float) -> WorkerLoad:
        # Pass the prefill rate, because reading the load advances the load book's estimate of each prompt's progress.
        return load_book.load(member.worker_id, now, fleet.prefill_rate(member))

    name = "stoker_gateway_{}".format
    metrics.gauge(name("running_requests"), "Requests being answered", lambda: state.num_running)
    metrics.gauge(name("waiting_requests"), "Requests in the queue", lambda: admission.num_waiting)
    metrics.gauge(name("connections"), "Client connections", lambda: server.num_connections)
    metrics.gauge(name("held_body_bytes"), "Bytes of request bodies held", lambda: server.bodies.held_bytes)
    metrics.gauge(name("ledger_pending_rows"), "Usage rows not yet on disk", lambda: meter.pending)
    metrics.gauge(name("ledger_rows_total"), "Usage rows written", lambda: meter.written, kind="counter")
    metrics.gauges(name("worker_usable"), "1 if the worker may get requests", lambda: of_workers(usable))
    metrics.gauges(
        name("worker_requests"),
        "Requests sent to the worker and not finished",
        lambda: of_workers(lambda member, now: load(member, now).requests),
    )
    metrics.gauges(
        name("worker_prefill_tokens"),
        "Uncached prompt tokens sent to the worker and not computed",
        lambda: of_workers(lambda member, now: load(member, now).prefill_tokens),
    )
    metrics.gauges(
        name("worker_kv_used"),
        "Share of the worker's KV memory in use",
        lambda: of_workers(lambda member, now: member.kv_used),
    )
    metrics.gauges(
        name("index_blocks"),
        "Prefix keys in the index",
        lambda: (((("model", model),), float(len(index))) for model, index in indexes.items()),
    )


def add_flex_gauges(metrics: GatewayMetrics, flex: FlexGate) -> None:
    name = "stoker_gateway_{}".format
    metrics.gauge(name("flex_running"), "Flex requests that run", lambda: flex.num_running)
    metrics.gauge(name("flex_waiting"), "Flex requests that wait for idle capacity", lambda: flex.num_waiting)
    metrics.gauge(
        name("flex_preempted_total"),
        "Lines of batches that were cancelled for an interactive request",
        lambda: flex.num_preempted,
        kind="counter",
    )


def add_task_counters(metrics: GatewayMetrics, errors: TaskErrors) -> None:
    metrics.gauges(
        "stoker_gateway_task_errors_total",
        "Unexpected errors of tasks that run all the time, which have gone on",
        lambda: (((("task", task),), float(count)) for task, count in errors.counts.items()),
        kind="counter",
    )


def add_store_gauges(metrics: GatewayMetrics, store: WatchedStore) -> None:
    name = "stoker_gateway_{}".format
    metrics.gauge(name("store_up"), "1 if the store works", lambda: float(store.trouble is None))
    metrics.gauge(
        name("store_failures_total"), "Transactions that the store failed", lambda: store.num_failures, kind="counter"
    )
