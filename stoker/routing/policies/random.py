"""Chooses a random worker, with probabilities proportional to the weights.

The choice is a function of the seed and of the number of requests before it, so that a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.hashing import uniform
from stoker.routing.policy import POLICIES, LegChoice
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.settings import RouterSettings


@POLICIES.register("random")
class Random:
    """Weighted random choice. Its state is the number of routed requests."""

    in_seconds = False

    def __init__(self, settings: RouterSettings) -> None:
        self._seed = settings.seed
        self._num_requests = 0

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, now: float) -> list[Reason]:
        return [Reason(one.worker_id, self._sample(one), one.cached_tokens) for one in candidates]

    def commit(self, query: RouteQuery, choices: Sequence[LegChoice], now: float) -> None:
        self._num_requests += 1

    def _sample(self, one: Candidate) -> float:
        """Sample from an exponential distribution: the minimum falls on each worker in proportion to its weight."""
        return -log(uniform(self._seed, self._num_requests, one.worker_id)) / one.member.weight
