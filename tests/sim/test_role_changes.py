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
        assert gateway.engines[WorkerId(worker)].num_open == 0

    simulation.loop.at(at_s, change)
    records = simulation.run(workload).records
    assert moved[0] > 0, "it had requests"
    assert records.outcomes == {"ok": 30}
    assert list(records.output_tokens) == [40] * 30
    member = gateway.fleet.member(WorkerId(worker))
    assert member is not None
    assert member.spec.role is role
    assert member.health.usable(simulation.loop.now_s), "a move is no failure"
