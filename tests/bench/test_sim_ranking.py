"""How `sim_ranking` judges orders, and that its loads can run on its fleets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gateway.sim_accuracy import CASES, POOL_SHARE, SMALL_POOL
from bench.gateway.sim_ranking import FLEETS, LOAD, judged, kendall_tau
from bench.support.cpu_fleet import BLOCK, AgentLoad, write_trace


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [40, 30, 20, 10], -1.0),
        ([1, 2, 3, 4], [20, 10, 30, 40], 4 / 6),
        ([1, 2, 3], [5, 5, 6], 2 / 3),
    ],
)
def test_tau_counts_the_pairs_in_the_same_order(first: list[float], second: list[float], tau: float) -> None:
    assert kendall_tau(first, second) == pytest.approx(tau)


def test_a_pick_is_compared_with_the_best_fleet() -> None:
    order, pick = judged({"a": 100.0, "b": 104.0, "c": 300.0}, {"a": 110.0, "b": 90.0, "c": 200.0})
    assert order.value == pytest.approx(1 / 3, abs=1e-3)
    assert (pick.value, pick.competitor_value) == (104.0, 100.0)
    assert pick.ratio is not None
    assert pick.target is not None
    assert pick.ratio > pick.target


def longest(load: AgentLoad) -> int:
    return load.system + load.turns * round(1.4 * load.step) + load.out


def test_there_are_12_fleets_and_each_can_hold_the_longest_request() -> None:
    assert len(FLEETS) == 12
    assert len(set(FLEETS.values())) == 12
    for fleet in FLEETS.values():
        assert fleet.kv_blocks * BLOCK > longest(LOAD)
    blocks = int(POOL_SHARE * SMALL_POOL.working_set_tokens / 2 / BLOCK)
    assert blocks * BLOCK > longest(SMALL_POOL)


def test_the_traces_of_all_loads_and_runs_can_exist_at_the_same_time(tmp_path: Path) -> None:
    """The warm-up of a fleet must not replace the trace that is played afterwards."""
    warm_up = AgentLoad("warm-up", 4, 1, 0, 200, 4, 0.0, 4)
    paths = [write_trace(load, number, tmp_path) for load in (LOAD, warm_up, *CASES) for number in range(2)]
    assert len({path.read_text(encoding="utf-8") for path in paths}) == len(paths)
