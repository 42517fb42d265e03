"""Balance of an idle fleet for requests without a session key.

In an idle fleet every queue is empty at every decision, so waiting times do not spread the work. A worker that has more
than its share of the recent requests then gives conversations to workers that have less.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from stoker.routing.candidate import Candidate
from stoker.routing.cost import Scene
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.session_placement import Preference


def relieve(
    query: RouteQuery, candidates: Sequence[Candidate], scene: Scene, reasons: Sequence[Reason], spare_tokens: float
) -> Preference | None:
    """If the cheapest candidate has too many recent requests, prefer one that has fewer than its share.

    Losing a shared prefix is not counted: all conversations that share it will use the new copy. A conversation's own
    blocks are a loss. It is paid from the budget `spare_tokens`, and it is limited for each request. Call this only for an
    idle fleet, and only if a worker has some of the prompt cached.
    """
    settings, mean_requests = scene.settings, scene.mean_requests
    costs_s = [reason.cost_s for reason in reasons]
    best = candidates[costs_s.index(min(costs_s))]
    share = mean_requests * best.member.weight
    if best.load.recent_requests - share <= settings.bound_requests:
        return None
    allowed, allowed_s = inf, inf
    if scene.continues:
        allowed, allowed_s = min(spare_tokens, settings.balance_part * query.num_tokens), settings.balance_s
    chosen, least_s = None, inf
    for index, one in enumerate(candidates):
        lost = scene.most_cached - one.cached_tokens
        if lost > min(allowed, allowed_s * one.member.tokens_per_s):
            continue
        without_move_s = reasons[index].cost_s - reasons[index].move_s
        if one.load.recent_requests < mean_requests * one.member.weight and without_move_s < least_s:
            chosen, least_s = Preference(index, lost if scene.continues else 0), without_move_s
    return chosen
