"""Anywhere, by weight: a function of the seed and of how many requests there were, so that a run can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from stoker.routing.hashing import uniform
from stoker.routing.policy import POLICIES, Candidate, RouterSettings
from stoker.routing.query import Reason, RouteQuery


@POLICIES.register("random")
class Random:
    in_seconds = False

    def __init__(self, settings: RouterSettings) -> None:
        self._seed = settings.seed
        self._count = 0

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], now: float) -> list[Reason]:
        self._count += 1
        # The least of exponential draws falls on each in proportion to its weight.
        return [
            Reason(
                one.worker_id, -log(uniform(self._seed, self._count, one.worker_id)) / _weight(one), one.cached_tokens
            )
            for one in candidates
        ]


def _weight(one: Candidate) -> float:
    return one.member.weight
