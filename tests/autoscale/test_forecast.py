"""The forecast of the decode load: growth goes on, and nothing else is taken for growth."""

from __future__ import annotations

import pytest

from stoker.autoscale.forecast import DecodeForecast
from stoker.autoscale.sample import PoolLoad


def loads(forecast: DecodeForecast, *pools: tuple[int, float]) -> list[float]:
    """Return the forecast for these numbers of workers and loads, one each second."""
    return [forecast.expected(PoolLoad(num, 0, load), float(at)).load for at, (num, load) in enumerate(pools)]


def test_growth_of_the_window_goes_on() -> None:
    assert loads(DecodeForecast(2.0, 1.0), (4, 0.2), (4, 0.3), (4, 0.4), (4, 0.4)) == pytest.approx(
        [0.2, 0.4, 0.6, 0.5]
    )


def test_a_load_that_falls_or_stays_is_taken_as_it_is() -> None:
    assert loads(DecodeForecast(9.0, 1.0), (4, 0.8), (4, 0.5), (4, 0.5), (4, 0.0)) == [0.8, 0.5, 0.5, 0.0]


def test_a_role_change_is_no_growth() -> None:
    assert loads(DecodeForecast(9.0, 1.0), (4, 0.3), (3, 0.4), (2, 0.6)) == pytest.approx([0.3, 0.4, 0.6])


def test_growth_alone_never_reaches_above_the_limit() -> None:
    assert loads(DecodeForecast(9.0, 1.0), (4, 0.1), (4, 0.9), (4, 1.5)) == pytest.approx([0.1, 1.0, 1.5])


def test_a_pool_without_workers_is_no_error() -> None:
    assert loads(DecodeForecast(9.0, 1.0), (0, 0.0), (1, 0.5), (0, 0.0)) == pytest.approx([0.0, 0.5, 0.0])


def test_a_load_that_was_not_known_before_is_no_growth() -> None:
    """After a restart of the gateway, all workers are new to it, and nothing is measured yet."""
    forecast = DecodeForecast(9.0, 1.0)
    assert forecast.expected(PoolLoad(4, 4, 0.0), 0.0).load == 0.0
    assert forecast.expected(PoolLoad(4, 0, 0.5), 1.0).load == 0.5
    assert forecast.expected(PoolLoad(4, 0, 0.6), 2.0).load == pytest.approx(0.7)
