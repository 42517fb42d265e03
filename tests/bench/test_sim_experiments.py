"""The simulator's experiments run, repeat exactly, and show the direction that they are about."""

from __future__ import annotations

import argparse

import pytest

from bench.contract import Report
from bench.gateway import sim_experiments
from bench.support.agent_mix import AgentMix
from stoker.routing.policy import POLICIES


@pytest.fixture(autouse=True)
def same_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiments register a policy. Other tests must not see it."""
    list(POLICIES)  # reads all modules first
    monkeypatch.setattr(POLICIES, "_entries", dict(POLICIES._entries))


def experiment(*names: str, arrivals_s: float = 2.0, max_workers: int = 4) -> Report:
    options = {"arrivals_s": arrivals_s, "max_workers": max_workers, "gpu_hour_price": 3.0}
    return sim_experiments.run(argparse.Namespace(experiments=list(names), **options))


def values(report: Report, metric: str) -> dict[str, float]:
    return {one.case.partition(": ")[2]: one.value for one in report.results if one.metric == metric}


def test_headers_and_a_shared_store_raise_the_hit_ratio() -> None:
    report = experiment("headers", "shared_store")
    hits = values(report, "token hit ratio")
    assert hits["balanced by tokens, no headers"] < hits["balanced by tokens, headers of all sessions"]
    assert hits["random, no shared store"] + 5 < hits["random, shared store"]
    assert not report.problems


def test_only_heavy_sessions_send_a_key_if_the_load_says_so() -> None:
    by_headers = {
        headers: [(one.name, len(list(one.turns))) for one in AgentMix(rate=20.0, headers=headers).sessions()]
        for headers in ("none", "heavy", "all")
    }
    assert all(name is None for name, _ in by_headers["none"])
    assert all(name is not None for name, _ in by_headers["all"])
    assert all((name is not None) == (turns >= 12) for name, turns in by_headers["heavy"])
    assert [turns for _, turns in by_headers["none"]] == [turns for _, turns in by_headers["all"]]


@pytest.mark.slow
def test_the_same_experiment_gives_the_same_results() -> None:
    first, second = (experiment("shared_store", arrivals_s=1.0, max_workers=2) for _ in range(2))
    assert first.results == second.results
    assert first.details == second.details
