"""`sim_scale` measures real processes, and repeats the smallest size."""

from __future__ import annotations

import argparse

import pytest

from bench.gateway import sim_scale


@pytest.mark.slow
def test_each_size_is_measured_and_repeats_exactly() -> None:
    report = sim_scale.run(argparse.Namespace(requests=[60, 20, 40], workers=2))
    assert not report.problems
    assert [row["requests"] for row in report.details] == [20, 40, 60, 20]
    by_metric = {(one.case, one.metric): one for one in report.results}
    assert by_metric["60 requests, 2 workers", "peak memory"].value > 10
    assert by_metric["60 requests, 2 workers", "wall time"].target == 1.0
    assert by_metric["20 requests, 2 workers", "wall time"].target is None
    assert by_metric["from 40 to 60 requests", "growth of the CPU time of a request"].value > 0
