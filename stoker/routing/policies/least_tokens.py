"""Chooses the worker with the fewest queued and resident tokens. It ignores caches."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.policy import POLICIES, LegChoice
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.settings import RouterSettings


@POLICIES.register("least_tokens")
class LeastTokens:
    """Least loaded by tokens. It has no settings and no state."""

    in_seconds = False

    def __init__(self, settings: RouterSettings) -> None:
        pass

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, now: float) -> list[Reason]:
        return [Reason(one.worker_id, _tokens(one), one.cached_tokens) for one in candidates]

    def commit(self, query: RouteQuery, choices: Sequence[LegChoice], now: float) -> None:
        pass


def _tokens(one: Candidate) -> float:
    """Return the worker's tokens, divided by its weight. Recent work counts less than one token: it breaks ties."""
    load = one.load
    recent = load.recent_tokens / (1 + load.recent_tokens)
    tokens = one.queued_tokens + load.context_tokens + load.output_tokens + recent
    return tokens / one.member.weight
