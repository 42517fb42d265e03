"""The capacity that admission uses follows the workers' reports."""

from __future__ import annotations

import math

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import LoadReport, Role, WorkerSpec
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.gateway.admission.capacity import Capacities

SETTINGS = AdmissionSettings(requests_per_worker=100, waiting_per_worker=4, prefill_s=10, prefill_tokens=1000)


def fleet_of(**roles: Role) -> Fleet:
    fleet = Fleet()
    for name, role in roles.items():
        fleet.add(WorkerSpec(worker_id=WorkerId(name), url=f"http://{name}", role=role, models=("m", "alias")), 0.0)
    return fleet


def test_workers_without_reports_are_bounded_by_the_settings() -> None:
    capacity = Capacities(fleet_of(a=Role.UNIFIED, b=Role.UNIFIED), SETTINGS).capacity("m", 1.0)
    assert (capacity.requests, capacity.prefill_tokens) == (200, math.inf)


def test_a_worker_whose_queue_grows_gets_little_more_than_it_runs() -> None:
    fleet = fleet_of(a=Role.UNIFIED, b=Role.UNIFIED)
    fleet.saw_report(WorkerId("a"), LoadReport(waiting_sequences=3, running_sequences=16), 1.0)
    fleet.saw_report(WorkerId("b"), LoadReport(waiting_sequences=0, running_sequences=16), 1.0)
    capacities = Capacities(fleet, SETTINGS)
    assert capacities.capacity("m", 1.0).requests == 20 + 100
    assert capacities.capacity("m", 100.0).requests == 200  # an old report is ignored


def test_prompts_are_bounded_in_seconds_of_prefill() -> None:
    fleet = fleet_of(a=Role.PREFILL, b=Role.DECODE)
    fleet.saw_report(WorkerId("a"), LoadReport(prefill_tokens_per_s=5000.0), 1.0)
    capacity = Capacities(fleet, SETTINGS).capacity("m", 1.0)
    assert (capacity.requests, capacity.prefill_tokens) == (100, 50_000)
    fleet.saw_report(WorkerId("a"), LoadReport(prefill_tokens_per_s=1.0), 1.0)
    assert Capacities(fleet, SETTINGS).capacity("m", 1.0).prefill_tokens == 1000


def test_a_rate_that_was_only_seen_from_outside_is_taken_less_strictly() -> None:
    fleet = fleet_of(a=Role.UNIFIED)
    fleet.saw_prefill(WorkerId("a"), 100, 1.0)
    assert Capacities(fleet, SETTINGS).capacity("m", 1.0).prefill_tokens == 8000


def test_without_a_usable_worker_the_capacity_is_unlimited() -> None:
    fleet = fleet_of(a=Role.UNIFIED)
    fleet.drain(WorkerId("a"), 0.0)
    assert Capacities(fleet, SETTINGS).capacity("m", 1.0).requests == math.inf


def test_models_of_the_same_workers_share_a_lane() -> None:
    fleet = fleet_of(a=Role.UNIFIED)
    fleet.add(WorkerSpec(worker_id=WorkerId("c"), url="http://c", models=("other",)), 0.0)
    capacities = Capacities(fleet, SETTINGS)
    assert capacities.lane("m", 1.0) == capacities.lane("alias", 1.0) == "alias"
    assert capacities.lane("other", 1.0) == "other"
    assert capacities.lane("invented", 1.0) is None
    fleet.add(WorkerSpec(worker_id=WorkerId("d"), url="http://d", models=("new",)), 1.0)
    assert capacities.lane("new", 1.6) == "new"
