"""How many workers of a pool circuit breakers may take out of service."""

from __future__ import annotations

import pytest

from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, FleetSettings
from stoker.fleet.health import HealthSettings
from stoker.fleet.spec import Role, WorkerSpec


def fleet_of(names: str, role: Role = Role.UNIFIED, **settings: float) -> Fleet:
    made = Fleet(FleetSettings(health=HealthSettings(open_s=100.0, max_open_s=100.0, **settings)))  # type: ignore[arg-type]
    for name in names:
        made.add(WorkerSpec(worker_id=WorkerId(name), url=f"http://{name}", role=role, models=("m",)), 0.0)
    return made


def fail(fleet: Fleet, names: str, now: float, kind: str = "lost") -> None:
    for name in names:
        for _ in range(3):
            fleet.saw_failure(WorkerId(name), now, kind)


def in_service(fleet: Fleet, now: float) -> str:
    return "".join(member.worker_id for member in fleet.pool("m", now).members)


def test_breakers_take_at_most_half_of_a_pool_out_of_service() -> None:
    fleet = fleet_of("abcde")
    for now, name, left in [(1.0, "c", "abde"), (2.0, "a", "bde"), (3.0, "e", "bde"), (4.0, "b", "bde")]:
        fail(fleet, name, now)
        assert in_service(fleet, now) == left, "those that failed first stay out"
    fail(fleet, "d", 5.0)
    assert in_service(fleet, 5.0) == "bde"
    fleet.saw_success(WorkerId("c"), 6.0)  # a request from before
    assert in_service(fleet, 6.0) == "bcd"


def test_the_only_worker_stays_in_service() -> None:
    fleet = fleet_of("a")
    fail(fleet, "a", 1.0)
    assert in_service(fleet, 1.0) == "a"
    assert fleet.usable_in_s("m", 1.0) == 100.0


@pytest.mark.parametrize("how", ["probe", "connect"])
def test_workers_that_are_known_to_be_down_are_not_brought_back(how: str) -> None:
    fleet = fleet_of("abcd")
    for name in "ab":
        if how == "probe":
            fleet.saw_probe(WorkerId(name), live=False, ready=False, now=1.0)
        else:
            fleet.saw_failure(WorkerId(name), 1.0, "connect")
    assert in_service(fleet, 1.0) == "cd"
    fail(fleet, "cd", 2.0)
    assert in_service(fleet, 2.0) == "cd"
    fleet.drain(WorkerId("d"), 3.0)
    assert in_service(fleet, 3.0) == "c"


def test_in_a_panic_all_reachable_workers_are_used() -> None:
    fleet = fleet_of("abcdef")
    fail(fleet, "a", 1.0)
    for name in "bc":
        fleet.saw_probe(WorkerId(name), live=False, ready=False, now=2.0)
    assert in_service(fleet, 2.0) == "def", "half of all workers are in service"
    fleet.saw_probe(WorkerId("d"), live=True, ready=False, now=3.0)
    assert in_service(fleet, 3.0) == "aef", "too few are left, so the worker on which requests failed is used again"
    fleet.saw_probe(WorkerId("d"), live=True, ready=True, now=4.0)
    assert in_service(fleet, 4.0) == "def"


def test_prefill_workers_are_a_pool_of_their_own() -> None:
    fleet = fleet_of("abcd", Role.DECODE)
    for name in "pq":
        fleet.add(WorkerSpec(worker_id=WorkerId(name), url=f"http://{name}", role=Role.PREFILL, models=("m",)), 0.0)
    fail(fleet, "pq", 1.0)
    assert in_service(fleet, 1.0) in ("abcdp", "abcdq")


def test_a_worker_that_is_brought_back_gets_no_trial_and_recovers_with_a_first_token() -> None:
    fleet = fleet_of("a")
    fail(fleet, "a", 1.0)
    member = fleet.member(WorkerId("a"))
    assert member is not None
    for _ in range(5):
        fleet.begin_request(member, 2.0)
        assert in_service(fleet, 2.0) == "a"
        fail(fleet, "a", 2.0)
    assert member.health.usable_at(2.0) == 101.0, "failures while the breaker is open do not make its backoff longer"
    fleet.saw_first_token(WorkerId("a"), 3.0)
    assert member.health.usable(3.0)


def test_both_limits_can_be_turned_off() -> None:
    fleet = fleet_of("ab", max_ejected_share=1.0, panic_share=0.0)
    fail(fleet, "ab", 1.0)
    assert in_service(fleet, 1.0) == ""


def test_a_share_above_one_is_rejected() -> None:
    with pytest.raises(ConfigError, match="max_ejected_share"):
        HealthSettings(max_ejected_share=1.5)


def test_a_pool_is_built_again_only_if_a_probe_shows_something_new() -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.add(WorkerSpec(worker_id=WorkerId(name), url="", models=("m",)), 0.0)
    before = fleet.pool("m", 1.0)
    fleet.saw_probe(WorkerId("a"), live=True, ready=True, now=1.0)
    assert fleet.pool("m", 1.0) is before
    fleet.saw_probe(WorkerId("a"), live=True, ready=False, now=1.1)
    assert [member.worker_id for member in fleet.pool("m", 1.1).members] == ["b"]
    fleet.saw_probe(WorkerId("a"), live=True, ready=True, now=1.2)
    assert [member.worker_id for member in fleet.pool("m", 1.2).members] == ["a", "b"]
