"""A session's worker is a weighted rendezvous hash of its key: every gateway agrees, and a worker that comes or goes moves
only its own sessions. Without a session key, of the conversation's first block."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.routing.hashing import rendezvous
from stoker.routing.policy import POLICIES, Candidate, RouterSettings
from stoker.routing.query import Reason, RouteQuery


@POLICIES.register("consistent_hash")
class ConsistentHash:
    in_seconds = False

    def __init__(self, settings: RouterSettings) -> None:
        """It has no settings."""

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], now: float) -> list[Reason]:
        key = query.parent_session or query.session or (query.keys[0] if query.keys else "")
        return [
            Reason(one.worker_id, rendezvous(key, one.worker_id, one.member.spec.weight), one.cached_tokens)
            for one in candidates
        ]
