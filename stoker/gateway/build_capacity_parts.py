"""Builds the part of a gateway that decides what may run: admission, the flex gate, the autoscaler."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce

from stoker.base.errors import Overloaded
from stoker.base.long_task import TaskErrors
from stoker.fleet.fleet import Fleet
from stoker.fleet.other_load import NO_OTHERS, OtherLoad
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.capacity import Capacities
from stoker.gateway.admission.flex import FlexGate
from stoker.gateway.build_durable_parts import DurableParts
from stoker.gateway.build_worker_side import WorkerSide
from stoker.gateway.config import GatewayConfig
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.records.meter import Meter, NoMeter
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.scaling import FleetSampler, ScaleBoard, Scaling
from stoker.gateway.watch.other_work import OtherWork


@dataclass(frozen=True, slots=True)
class CapacityParts:
    """The components that decide when a request may run, and how many workers of each role there are."""

    admission: Admission
    flex: FlexGate
    scaling: Scaling


def build_capacity_parts(
    config: GatewayConfig,
    workers: WorkerSide,
    durable: DurableParts,
    state: GatewayState,
    metrics: GatewayMetrics,
    clock: Callable[[], float],
    errors: TaskErrors,
) -> CapacityParts:
    """Create what decides about capacity. Call it only once: the flex gate follows `workers.other_work`."""
    admission = _admission(config, workers.fleet, state, durable, clock)
    flex = _flex(config, workers.fleet, workers.other_work, clock)
    return CapacityParts(admission, flex, _scaling(config, workers, admission, metrics, clock, errors))


def _admission(
    config: GatewayConfig, fleet: Fleet, state: GatewayState, durable: DurableParts, clock: Callable[[], float]
) -> Admission:
    capacities = Capacities(fleet, config.admission)
    return Admission(
        config.admission,
        capacities.capacity,
        clock=clock,
        lane=capacities.lane,
        gate=partial(_refusal, state, durable.meter),
        leases=durable.leases,
        price=durable.prices.price,
    )


def _refusal(state: GatewayState, meter: Meter | NoMeter) -> Overloaded | None:
    """Return the reason to refuse all new requests, or None."""
    refusal = meter.refusal()
    if refusal is not None:
        return refusal
    return state.refusal() if state.draining else None


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


def _scaling(
    config: GatewayConfig,
    workers: WorkerSide,
    admission: Admission,
    metrics: GatewayMetrics,
    clock: Callable[[], float],
    errors: TaskErrors,
) -> Scaling:
    """Return the autoscaler. Of several processes, only the first one decides."""
    settings = config.autoscale if config.process == 0 else replace(config.autoscale, mode="off")
    board = ScaleBoard(clock, secrets.token_hex(8))
    sampler = FleetSampler(workers.fleet, workers.load_book, admission, metrics.ttft_s)
    return Scaling(settings, sampler, workers.duties, board, board, clock, errors)
