"""Histograms: which bucket a value belongs to, and that the time of counting changes nothing."""

from __future__ import annotations

import pytest

from stoker.base.histogram import Histogram

VALUES = [0.5, 1.0, 1.0, 0.01, 2.0, 2.5, 99.0]


def test_a_value_on_a_bound_is_in_the_bucket_that_ends_there() -> None:
    histogram = Histogram((0.5, 1.0, 2.0))
    for value in VALUES:
        histogram.observe(value)
    assert histogram.cumulative() == [2, 4, 5, 7]
    assert histogram.sum == pytest.approx(106.01)


def test_reading_early_changes_nothing() -> None:
    histogram = Histogram((0.5, 1.0, 2.0))
    for value in VALUES:
        histogram.observe(value)
        histogram.cumulative()
    assert histogram.cumulative() == [2, 4, 5, 7]


def test_values_in_bulk_count_like_single_ones() -> None:
    histogram = Histogram((0.5, 1.0, 2.0))
    histogram.observe_all(VALUES)
    assert histogram.cumulative() == [2, 4, 5, 7]


def test_many_values_are_counted_without_being_read() -> None:
    histogram = Histogram((1.0,))
    for value in range(10_000):
        histogram.observe(value % 4)
    assert histogram.cumulative() == [5_000, 10_000]
    assert histogram.sum == 15_000
