"""The simulated fleet: its times follow from the calibration, and every run ends with nothing left over."""

from __future__ import annotations

import gc
from dataclasses import replace
from statistics import median
from typing import Any

import msgspec
import pytest
from sim_world import BLOCK, Listed, alone, calibration, simulate

from stoker.base import garbage
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.sim import simulated_device
from stoker.sim.simulation import SimConfig, SimFleet, SimOutcome, Simulation
from stoker.sim.workloads.synthetic import Synthetic
from stoker.sim.workloads.workload import SimTurn

ONE = SimFleet(unified=1)
AGENTS = Synthetic(
    requests=120, rate=4.0, input_tokens=200, output_tokens=40, spread=0.5, turns=4, system_tokens=300, think_s=1.0
)


def columns(outcome: SimOutcome) -> list[list[float]]:
    records = outcome.records
    return [list(one) for one in (records.started_s, records.ttft_s, records.ended_s, records.cached_tokens)]


def check_nothing_is_left(outcome: SimOutcome) -> None:
    for engine in outcome.engines:
        assert engine.num_open == 0
        assert not engine.scheduler.has_work
        engine.pool.check()
        assert engine.pool.num_free == engine.pool.num_blocks


def test_a_single_request_takes_the_time_of_its_steps() -> None:
    outcome = simulate(Listed((alone(400, 5),)), ONE)
    prefill_s = 0.010 + 400 * 1e-4
    decode_s = [0.0101 + 1e-7 * (400 + i) for i in range(1, 5)]
    assert outcome.records.ttft_s[0] == pytest.approx(0.002 + prefill_s)
    assert outcome.records.ended_s[0] == pytest.approx(0.002 + prefill_s + sum(decode_s))
    assert outcome.engines[0].busy_s == pytest.approx(prefill_s + sum(decode_s))


def test_a_prompt_that_was_sent_before_is_cached() -> None:
    outcome = simulate(Listed((alone(400, 5), alone(400, 5, start_s=10.0))), ONE)
    assert list(outcome.records.cached_tokens) == [0, (399 // BLOCK) * BLOCK]


def test_a_later_turn_finds_the_answer_of_the_turn_before() -> None:
    first = SimTurn(((1, 160),), 64, 2)
    second = SimTurn(((1, 160), (2, 64), (3, 50)), 4, 4)
    outcome = simulate(Listed(((0.0, (first, second)),)), ONE)
    assert outcome.records.cached_tokens[1] == (160 + 63) // BLOCK * BLOCK


@pytest.mark.parametrize("ahead", [0, 1])
def test_runs_of_steps_change_no_time(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode-only steps are planned in runs for speed. Single steps give the same result."""
    found = calibration(steps_ahead=ahead)
    in_runs = simulate(AGENTS, ONE, found)
    monkeypatch.setattr(simulated_device, "_MAX_RUN", 1)
    alone = simulate(AGENTS, ONE, found)
    assert columns(in_runs) == [pytest.approx(one) for one in columns(alone)]
    assert in_runs.records.gaps.quantile_s(0.9) == pytest.approx(alone.records.gaps.quantile_s(0.9))
    assert in_runs.num_events < alone.num_events


@pytest.mark.parametrize("fleet", [SimFleet(unified=3), SimFleet(prefill=1, decode=2)], ids=["unified", "pd"])
def test_runs_of_steps_hardly_change_a_fleet(fleet: SimFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers report their load between two runs, so the router may choose another of two similar workers."""
    in_runs = simulate(AGENTS, fleet)
    monkeypatch.setattr(simulated_device, "_MAX_RUN", 1)
    alone = simulate(AGENTS, fleet)
    for share in (0.5, 0.9):
        assert in_runs.records.gaps.quantile_s(share) == pytest.approx(alone.records.gaps.quantile_s(share), rel=0.03)
    assert median(in_runs.records.ttft_s) == pytest.approx(median(alone.records.ttft_s), rel=0.05)
    assert sum(in_runs.records.cached_tokens) == pytest.approx(sum(alone.records.cached_tokens), rel=0.01)


@pytest.mark.parametrize("blocks", [60, 120, 2000])
def test_every_request_ends_whatever_the_size_of_the_cache(blocks: int) -> None:
    outcome = simulate(AGENTS, SimFleet(prefill=1, decode=1, unified=1, kv_blocks=blocks), concurrency=12)
    assert sum(outcome.records.outcomes.values()) == AGENTS.requests
    assert outcome.records.outcomes["ok"] >= AGENTS.requests // 2
    check_nothing_is_left(outcome)


def test_the_same_seed_gives_the_same_times() -> None:
    fleet = SimFleet(prefill=1, decode=1, unified=1)
    assert columns(simulate(AGENTS, fleet)) == columns(simulate(AGENTS, fleet))


def test_tokens_of_a_hand_off_are_pulled_and_not_computed_again() -> None:
    outcome = simulate(Listed((alone(800, 20),)), SimFleet(prefill=1, decode=1))
    prefill, decode = outcome.engines
    assert prefill.scheduler.counters.computed_tokens == 800
    assert decode.scheduler.counters.pulled_tokens == 800
    counters = decode.scheduler.counters
    assert counters.computed_tokens + counters.accepted_draft_tokens == 19
    check_nothing_is_left(outcome)


@pytest.mark.parametrize("fault", ["loss:unified-0@2+5", "cut:unified-0@2+5", "slow:unified-0@2+5x5"])
def test_a_fault_costs_time_and_no_answer(fault: str) -> None:
    fleet = SimFleet(unified=2)
    calm, faulty = simulate(AGENTS, fleet), simulate(AGENTS, fleet, faults=(fault,))
    assert faulty.records.outcomes == {"ok": AGENTS.requests}
    assert sum(faulty.records.ended_s) - sum(faulty.records.started_s) > sum(calm.records.ended_s) - sum(
        calm.records.started_s
    )
    check_nothing_is_left(faulty)


def test_a_prefill_worker_that_cannot_be_reached_costs_no_answer() -> None:
    fleet = SimFleet(prefill=1, decode=1)
    outcome = simulate(AGENTS, fleet, faults=("loss:prefill-0@3+10",))
    assert outcome.records.outcomes == {"ok": AGENTS.requests}
    check_nothing_is_left(outcome)


def test_a_store_keeps_what_the_device_has_evicted() -> None:
    without = simulate(AGENTS, SimFleet(unified=1, kv_blocks=150))
    with_store = simulate(AGENTS, SimFleet(unified=1, kv_blocks=150, host_gib=1.0))
    assert sum(with_store.records.cached_tokens) > 1.2 * sum(without.records.cached_tokens)
    assert with_store.tiers[0].hit_tokens > 0
    check_nothing_is_left(with_store)


def test_speculation_shortens_answers() -> None:
    import msgspec

    from stoker.sim.calibration import SpeculationModel

    found = msgspec.structs.replace(calibration(), speculation=SpeculationModel(3, 0.8))
    plain = simulate(Listed((alone(64, 100),)), ONE)
    drafted = simulate(Listed((alone(64, 100),)), ONE, found)
    assert drafted.records.ended_s[0] < 0.6 * plain.records.ended_s[0]
    assert drafted.engines[0].scheduler.counters.accepted_draft_tokens > 30


def test_jitter_spreads_the_gaps_of_decode_only_steps_and_repeats_exactly() -> None:
    found = calibration()
    parts = [0.8, 0.9, 1.0, 1.1, 1.2]
    jittered = msgspec.structs.replace(found, step=msgspec.structs.replace(found.step, jitter=parts))
    load = Listed((alone(400, 200),))
    steady, spread, again = (simulate(load, ONE, one) for one in (found, jittered, jittered))
    assert spread.records.ttft_s[0] == steady.records.ttft_s[0]
    assert columns(spread) == columns(again)
    middle_s = steady.records.gaps.quantile_s(0.5)
    assert middle_s is not None
    assert spread.records.gaps.quantile_s(0.05) == pytest.approx(0.8 * middle_s, rel=0.02)
    assert spread.records.gaps.quantile_s(0.95) == pytest.approx(1.2 * middle_s, rel=0.02)
    assert spread.records.ended_s[0] == pytest.approx(steady.records.ended_s[0], rel=0.05)


def test_a_fleet_has_run_before_so_its_rates_are_known() -> None:
    simulation = Simulation(SimConfig(calibration(), SimFleet(unified=2)))
    rates = [member.tokens_per_s for member in simulation.gateway.fleet.members()]
    assert rates == [pytest.approx(512 / (0.010 + 512 * 1e-4))] * 2


@pytest.mark.parametrize(
    ("fleet", "changes"),
    [
        (ONE, {"admission": AdmissionSettings(requests_per_worker=2, queue_requests=20, queue_s=2.0)}),
        (SimFleet(prefill=1, decode=1), {}),
        (SimFleet(unified=2), {"faults": ("loss:unified-0@5+5", "cut:unified-1@15+5")}),
    ],
)
def test_requests_leave_no_reference_cycles(fleet: SimFleet, changes: dict[str, Any]) -> None:
    """The garbage collector is paused during a simulation. So cycles would need memory for each request."""

    def cycles(requests: int) -> int:
        gc.collect()
        with garbage.paused():
            outcome = simulate(replace(AGENTS, rate=8.0, requests=requests), fleet, **changes)
            assert len(outcome.records) == requests
            return gc.collect()

    gc.freeze()  # a collection does not look at the objects of other tests, which takes seconds
    try:
        cycles(10)  # what is only created once
        assert cycles(240) <= cycles(120) + 10
    finally:
        gc.unfreeze()
