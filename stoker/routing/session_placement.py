"""Placement of sessions: a home for a new session, and moves that even out the requests of an idle fleet.

Blocks already lead a known conversation back to its worker. A session key adds which conversations are alive, and so
which requests are still to come. The functions here are pure: they take the costs of the candidates and the number of
living sessions on each, and return the candidate to prefer. The policy's `commit` remembers where a session was placed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple

from stoker.base.ids import WorkerId
from stoker.routing.candidate import Candidate
from stoker.routing.cost import Scene
from stoker.routing.hashing import rendezvous
from stoker.routing.query import Reason, RouteQuery


class Preference(NamedTuple):
    """A candidate that a placement rule prefers, and the cached tokens that are given up for balance."""

    position: int  # in the list of candidates
    spent_tokens: int = 0


def prefer(reasons: list[Reason], preference: Preference) -> None:
    """Make the preferred candidate the cheapest one, by a negative `placement_s`."""
    position, spent_tokens = preference
    reason = reasons[position]
    placement_s = min([one.cost_s for one in reasons]) - reason.cost_s - 1e-6
    reasons[position] = reason._replace(
        cost_s=reason.cost_s + placement_s, placement_s=placement_s, spent_tokens=spent_tokens
    )


def find_home(
    query: RouteQuery,
    candidates: Sequence[Candidate],
    scene: Scene,
    reasons: Sequence[Reason],
    alive: Sequence[int],
    total_alive: int,
    most_alive: int,
) -> Preference | None:
    """Choose the worker of a new session, among those that have room and are about as good as the best worker.

    A worker has room while it has no more living sessions than its share. Among several workers a rendezvous hash of the
    session decides, so that gateways agree without communicating. In an idle fleet, a worker with fewer sessions may be
    `even_s` worse for each session that the fullest worker has more, and computing a shared prefix there costs nothing
    extra, because other sessions will use it too. `total_alive` and `most_alive` are of all workers, candidates or not.
    """
    idle = scene.idle
    share = (total_alive + 1) / scene.weight
    even_s = scene.settings.even_s if idle else 0.0
    costs_s = [reason.cost_s - reason.recent_s - (reason.move_s if idle else 0.0) for reason in reasons]
    best_s = min(costs_s)
    session = query.parent_session or query.session or ""
    homes = []
    for index, one in enumerate(candidates):
        has_room = alive[index] + 1 <= ceil(share * one.member.weight)
        if has_room and costs_s[index] <= best_s + even_s * (most_alive - alive[index]):
            homes.append((rendezvous(session, one.worker_id, one.member.spec.weight), index))
    return Preference(min(homes)[1]) if homes else None


def is_exceeded(
    candidates: Sequence[Candidate], home: int, requests_per_session: float, num_alive: Callable[[WorkerId], int]
) -> bool:
    """Return True if another worker will clearly have more requests for its weight than the home. Then `even_out` moves nothing.

    It ends at the first such worker, which is much faster than comparing all of them.
    """

    def expected(one: Candidate) -> float:
        return (one.load.recent_requests + requests_per_session * num_alive(one.worker_id)) / one.member.weight

    most = expected(candidates[home]) * (1 + 1e-9)  # rounding decides nothing here
    return any(expected(one) > most for one in candidates)


def even_out(
    candidates: Sequence[Candidate],
    scene: Scene,
    reasons: Sequence[Reason],
    alive: Sequence[int],
    home: int,
    requests_per_session: float,
    spare_tokens: float,
    num_tokens: int,
    total_expected: float | None = None,
) -> Preference | None:
    """Move a session from the worker that will have the most requests to the one that will have the fewest.

    A worker's expected requests are its recent ones plus `requests_per_session` for each living session. The session
    moves only if it loses few cached tokens: the loss is paid from the budget `spare_tokens`, of which a small excess may
    use only a small part. Call this only for an idle fleet. `total_expected` are the expected requests of all workers, if
    there are more than the candidates.
    """
    settings = scene.settings
    expected = [
        one.load.recent_requests + requests_per_session * count for one, count in zip(candidates, alive, strict=True)
    ]
    share = (sum(expected) if total_expected is None else total_expected) / scene.weight
    excess = [count / (share * one.member.weight) - 1 for one, count in zip(candidates, expected, strict=True)]
    least = excess.index(min(excess))
    lost = candidates[home].cached_tokens - candidates[least].cached_tokens
    allowed = min(
        min(1.0, settings.move_share * excess[home]) * spare_tokens,
        settings.balance_part * num_tokens,
        settings.balance_s * candidates[least].member.tokens_per_s,
    )
    if (
        0 < lost <= allowed  # where nothing is lost, as with a shared store, the cost has decided already
        and excess[home] == max(excess)
        and expected[home] - expected[least] > max(requests_per_session, settings.bound_requests)
        and reasons[least].queue_s - reasons[home].queue_s <= settings.even_s
    ):
        return Preference(least, lost)
    return None
