"""Chooses the workers in turn, by smooth weighted round robin."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.ids import WorkerId
from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.policy import POLICIES, LegChoice
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.settings import RouterSettings


@POLICIES.register("round_robin")
class RoundRobin:
    """Chooses the candidate with the most credit.

    With each request, every candidate gains credit equal to its weight. The chosen one pays the sum of all weights.
    """

    in_seconds = False

    def __init__(self, settings: RouterSettings) -> None:
        self._credit: dict[WorkerId, float] = {}

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, now: float) -> list[Reason]:
        credit = self._credit
        return [
            Reason(one.worker_id, -credit.get(one.worker_id, 0.0) - one.member.weight, one.cached_tokens)
            for one in candidates
        ]

    def commit(self, query: RouteQuery, choices: Sequence[LegChoice], now: float) -> None:
        for choice in choices:
            for one in choice.candidates:
                self._credit[one.worker_id] = self._credit.get(one.worker_id, 0.0) + one.member.weight
            chosen = choice.candidates[choice.chosen].worker_id
            self._credit[chosen] -= sum(one.member.weight for one in choice.candidates)
