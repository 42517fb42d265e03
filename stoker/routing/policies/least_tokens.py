"""The worker with the least to do: tokens queued and resident, blind to caches."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.routing.policy import POLICIES, Candidate, RouterSettings
from stoker.routing.query import Reason, RouteQuery


@POLICIES.register("least_tokens")
class LeastTokens:
    in_seconds = False

    def __init__(self, settings: RouterSettings) -> None:
        """It has no settings."""

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], now: float) -> list[Reason]:
        return [Reason(one.worker_id, _tokens(one), one.cached_tokens) for one in candidates]


def _tokens(one: Candidate) -> float:
    """What the others hold there, by the worker's weight. Recent work decides between the idle: it is below a token."""
    load = one.load
    recent = load.recent_tokens / (1 + load.recent_tokens)
    tokens = one.queued_tokens + load.context_tokens + load.output_tokens + recent
    return tokens / one.member.weight
