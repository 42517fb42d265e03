"""Roles change in the middle of a simulation: every request is still answered, in the new pools."""

from __future__ import annotations

import pytest
from sim_world import Listed, alone, calibration

from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role
from stoker.sim.simulation import SimConfig, SimFleet, Simulation


@pytest.mark.parametrize(
    ("worker", "role", "at_s"), [("decode-0", Role.PREFILL, 0.25), ("prefill-0", Role.DECODE, 0.25)]
)
def test_requests_of_a_worker_with_a_new_role_continue_elsewhere(worker: str, role: Role, at_s: float) -> None:
    workload = Listed(tuple(alone(2000, 40, start_s=0.01 * i, token=7 + i) for i in range(30)))
    simulation = Simulation(SimConfig(calibration(), SimFleet(prefill=2, decode=2), session_keys=False))
    gateway, moved = simulation.gateway, []

    def change() -> None:
        moved.append(gateway.engines[WorkerId(worker)].num_open)
        gateway.change_role(WorkerId(worker), role)

    simulation.loop.at(at_s, change)
    records = simulation.run(workload).records
    assert moved[0] > 0, "it had requests"
    assert records.outcomes == {"ok": 30}
    assert list(records.output_tokens) == [40] * 30
    member = gateway.fleet.member(WorkerId(worker))
    assert member is not None
    assert member.spec.role is role
    assert member.health.usable(simulation.loop.now_s), "a move is no failure"


def test_moved_requests_leave_after_the_running_step_and_keep_their_kv() -> None:
    workload = Listed(tuple(alone(2000, 300, start_s=0.01 * i, token=7 + i) for i in range(12)))
    simulation = Simulation(SimConfig(calibration(), SimFleet(prefill=2, decode=2), session_keys=False))
    gateway, moving = simulation.gateway, WorkerId("decode-0")
    engine, num_open = gateway.engines[moving], []
    prefills = [gateway.engines[WorkerId(f"prefill-{i}")].scheduler for i in range(2)]
    num_computed = []

    def change() -> None:
        num_open.append(engine.num_open)
        num_computed.extend(one.counters.computed_tokens for one in prefills)
        gateway.change_role(moving, Role.PREFILL)

    simulation.loop.at(3.0, change)
    simulation.loop.at(3.1, lambda: num_open.append(engine.num_open))
    records = simulation.run(workload).records
    assert num_open[0] > 3, "it had requests"
    assert num_open[1] == 0
    assert records.outcomes == {"ok": 12}
    assert list(records.output_tokens) == [300] * 12
    assert [one.counters.computed_tokens for one in prefills] == num_computed, "no prompt is computed again"
    assert not any(one.scheduler.num_held for one in gateway.engines.values()), "all leases are released"
