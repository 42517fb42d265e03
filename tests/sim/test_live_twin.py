from __future__ import annotations

import random

import pytest

from stoker.base.ids import WorkerId
from stoker.sim.live_twin import Drift, LiveTwin, PrefillWork, by_rates

WORKERS = [WorkerId(f"w{i}") for i in range(4)]


def predict(work: PrefillWork) -> float:
    return 0.01 + (work.queued_tokens + work.new_tokens) / 10_000


def traffic(
    twin: LiveTwin, seed: int, delay_s: dict[WorkerId, float], *, start_s: float, seconds: float, workers=WORKERS
) -> list[tuple[float, Drift]]:
    """Send one request to each worker about every second. A stopped worker delays half of its requests."""
    rng, now, found = random.Random(seed), start_s, []
    while now < start_s + seconds:
        now += rng.expovariate(len(workers))
        worker = rng.choice(workers)
        work = PrefillWork(rng.choice([0, 0, 500.0]), rng.randrange(50, 2000), 4000)
        actual_s = predict(work) * rng.uniform(0.7, 1.4)
        if rng.random() < 0.5:
            actual_s += rng.random() * delay_s.get(worker, 0.0)
        found += [(now, drift) for drift in twin.observe(worker, work, actual_s, now)]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_is_stopped_in_bursts_is_named_within_a_minute_and_no_other(seed: int) -> None:
    twin = LiveTwin(predict, is_absolute=True)
    assert traffic(twin, seed, {}, start_s=0.0, seconds=120.0) == []
    found = traffic(twin, seed + 100, {WORKERS[2]: 2.0}, start_s=120.0, seconds=90.0)
    assert [drift.worker_id for _, drift in found] == [WORKERS[2]]
    at_s, drift = found[0]
    assert at_s < 180.0
    assert drift.is_slow
    assert drift.ratio > 2 * drift.typical_ratio
    assert twin.slow() == [WORKERS[2]]
    (recovered,) = traffic(twin, seed + 200, {}, start_s=210.0, seconds=120.0)
    assert not recovered[1].is_slow
    assert twin.slow() == []


def test_a_whole_fleet_that_is_slower_than_its_workers_say_names_none() -> None:
    twin = LiveTwin(lambda work: predict(work) / 5, is_absolute=False)
    assert traffic(twin, 1, {}, start_s=0.0, seconds=120.0) == []


def test_a_single_worker_is_judged_only_by_a_calibration() -> None:
    for is_absolute, expected in ((True, [WORKERS[0]]), (False, [])):
        twin = LiveTwin(predict, is_absolute=is_absolute)
        found = traffic(twin, 3, {WORKERS[0]: 4.0}, start_s=0.0, seconds=60.0, workers=WORKERS[:1])
        assert [drift.worker_id for _, drift in found] == expected


def test_rates_of_the_fleet_hide_no_slow_worker() -> None:
    rates = [10_000.0, 9_000.0, 100.0]  # the last one reports how slow it became
    assert by_rates(lambda: rates, lambda: [0.02, 0.02, 0.9])(PrefillWork(0, 900, 900)) == pytest.approx(0.12)


def test_a_worker_that_left_is_forgotten() -> None:
    twin = LiveTwin(predict, is_absolute=True)
    traffic(twin, 1, {}, start_s=0.0, seconds=30.0)
    twin.forget(WORKERS[0])
    assert WORKERS[0] not in twin.ratios()
