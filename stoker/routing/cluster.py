"""ClusterLevel: chooses the cluster of a request; the routing policy then chooses a worker inside it.

The home cluster of a session is a weighted rendezvous hash of its key, so that all gateways agree without communicating.
A conversation without a session key has its home where most of its blocks are. A request leaves its home cluster when the
cluster has no usable workers, or when the cluster's shortest queue is longer than the best cluster's by more than
`spill_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.load_book import LoadBook
from stoker.fleet.prefix_index import Match
from stoker.fleet.spec import Role
from stoker.routing.hashing import rendezvous
from stoker.routing.query import RouteQuery


class ClusterLevel:
    """Narrows the workers of a request to those of one cluster. See the module docstring."""

    def __init__(self, load_book: LoadBook, spill_s: float) -> None:
        self._load_book = load_book
        self._spill_s = spill_s

    def narrow(
        self, query: RouteQuery, members: Sequence[Member], matches: Mapping[WorkerId, Match], now: float
    ) -> Sequence[Member]:
        """Return the members of the cluster that gets this request."""
        if len({member.spec.cluster for member in members}) < 2:
            return members
        by_cluster: dict[str, list[Member]] = {}
        for member in members:
            by_cluster.setdefault(member.spec.cluster, []).append(member)
        queues = {name: self._queue_s(inside, now) for name, inside in by_cluster.items() if _can_serve(inside)}
        if not queues:
            return []
        bound = min(queues.values()) + self._spill_s
        return next(
            by_cluster[name] for name in self._order(query, by_cluster, matches) if queues.get(name, inf) <= bound
        )

    def _order(
        self, query: RouteQuery, by_cluster: dict[str, list[Member]], matches: Mapping[WorkerId, Match]
    ) -> list[str]:
        """Return the cluster names in order of preference, the home cluster first."""

        def distance(name: str) -> tuple[int, float]:
            inside = by_cluster[name]
            weight = sum(member.spec.weight for member in inside)
            session = query.parent_session or query.session
            if session is not None:
                return 0, rendezvous(session, name, weight)
            held = max((matches[m.worker_id].blocks for m in inside if m.worker_id in matches), default=0)
            return -held, rendezvous(query.keys[-1] if query.keys else "", name, weight)

        return sorted(by_cluster, key=distance)

    def _queue_s(self, members: Sequence[Member], now: float) -> float:
        """Return the shortest queue of these workers, in seconds."""

        def wait_s(member: Member) -> float:
            load = self._load_book.load(member.worker_id, now, member.tokens_per_s)
            return load.queued_tokens / member.tokens_per_s

        return min(map(wait_s, members))


def _can_serve(members: Sequence[Member]) -> bool:
    """Return True if these workers can run a whole request, alone or as a prefill/decode pair."""
    prefill = {member.spec.dialect for member in members if member.spec.role is Role.PREFILL}
    return any(
        member.spec.role is Role.UNIFIED
        or (member.spec.role is Role.DECODE and (member.spec.decodes_alone or member.spec.dialect in prefill))
        for member in members
    )
