"""Chooses the worker of a session by a weighted rendezvous hash of its key.

All gateways agree, and a worker that joins or leaves moves only its own sessions. Without a session key, the prompt's
first block is hashed.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.hashing import rendezvous
from stoker.routing.policy import POLICIES, LegChoice
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.settings import RouterSettings


@POLICIES.register("consistent_hash")
class ConsistentHash:
    """Consistent hashing. It has no settings and no state."""

    in_seconds = False

    def __init__(self, settings: RouterSettings) -> None:
        pass

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, now: float) -> list[Reason]:
        key = query.parent_session or query.session or (query.keys[0] if query.keys else "")
        return [
            Reason(one.worker_id, rendezvous(key, one.worker_id, one.member.spec.weight), one.cached_tokens)
            for one in candidates
        ]

    def commit(self, query: RouteQuery, choices: Sequence[LegChoice], now: float) -> None:
        pass
