"""One after the other, by weight: the worker that has had the least turns for its weight."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.ids import WorkerId
from stoker.routing.policy import POLICIES, Candidate, RouterSettings
from stoker.routing.query import Reason, RouteQuery


@POLICIES.register("round_robin")
class RoundRobin:
    """Smooth weighted round robin: every time, each candidate gains its weight, and the winner pays for all."""

    in_seconds = False

    def __init__(self, settings: RouterSettings) -> None:
        self._credit: dict[WorkerId, float] = {}

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], now: float) -> list[Reason]:
        total = 0.0
        for one in candidates:
            weight = one.member.weight
            self._credit[one.worker_id] = self._credit.get(one.worker_id, 0.0) + weight
            total += weight
        reasons = [Reason(one.worker_id, -self._credit[one.worker_id], one.cached_tokens) for one in candidates]
        winner = min(reasons, key=lambda reason: reason.cost_s)
        self._credit[winner.worker_id] -= total
        return reasons
