"""The rings of the series: what is added is found again at every resolution, and memory is bounded."""

from __future__ import annotations

import random

import pytest

from stoker.gateway.insight.series_rings import Resolution, SeriesBook, SeriesRing, quantile


def test_every_resolution_has_the_same_sum() -> None:
    book = SeriesBook(1, 1, (Resolution(1, 600), Resolution(10, 60), Resolution(300, 4)))
    total = 0.0
    for second in range(600):
        total += second % 7
        book.tick(3000.0 + second, [total], [2.0])
    for step, count in ((1, 600), (10, 60), (300, 2)):
        sums = book.ring(step).total(3599.0, count)
        assert sums == [total, 1200.0, 600.0]


def test_a_window_has_gaps_where_nothing_was_added_and_forgets_the_oldest() -> None:
    ring = SeriesRing(Resolution(1, 4), 1)
    for second in (0, 1, 3, 5):
        ring.add(float(second), [1.0])
    points = ring.window(5.0, 100)
    assert [start for start, _ in points] == [2.0, 3.0, 4.0, 5.0]
    assert [row is not None for _, row in points] == [False, True, False, True]
    assert ring.window(9.0, 4) == [(6.0, None), (7.0, None), (8.0, None), (9.0, None)]
    assert ring.window(1.0, 4)[0] == (-2.0, None)


def test_time_that_goes_back_is_counted_in_the_newest_point() -> None:
    ring = SeriesRing(Resolution(1, 4), 1)
    ring.add(10.0, [1.0])
    ring.add(3.0, [1.0])
    assert ring.total(10.0, 4) == [2.0]


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="4 numbers instead of 3"):
        SeriesBook(1, 1).tick(0.0, [1.0], [1.0, 2.0])


def test_quantiles_are_within_a_bucket_of_the_exact_ones() -> None:
    bounds = [2.0**i for i in range(12)]
    values = sorted(random.Random(5).uniform(0, 1500) for _ in range(2000))
    cumulative = [sum(value <= bound for value in values) for bound in bounds] + [len(values)]
    for share in (0.05, 0.5, 0.95):
        exact, found = values[int(share * len(values))], quantile(bounds, cumulative, share)
        assert found is not None
        assert exact / 2 <= found <= exact * 2
    assert quantile(bounds, [0] * 13, 0.5) is None
    assert quantile(bounds, [0] * 12 + [3], 0.5) == bounds[-1]
