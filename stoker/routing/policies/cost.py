"""The default policy: the lowest cost in seconds, adjusted by placement rules for sessions and for an idle fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import ceil

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.routing.candidate import Candidate, PoolTotals, PrefixInfo
from stoker.routing.cost import Scene, build_scene, costs
from stoker.routing.hashing import nearest
from stoker.routing.idle_balance import relieve
from stoker.routing.policy import POLICIES, LegChoice
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.session_placement import Preference, even_out, find_home, is_exceeded, prefer
from stoker.routing.sessions import Sessions
from stoker.routing.settings import RouterSettings

_PREFERRED_HOMES = 8  # of a new session, among the workers with room
_BUDGET_REQUESTS = 8192  # unspent tokens of the balance budget decay over this number of requests


@POLICIES.register("cost")
class Cost:
    """Scores with `routing/cost.py`. Its state is the balance budget and the living sessions; only `commit` changes it."""

    in_seconds = True

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings.cost
        self._spare_tokens = 0.0  # cached tokens that may be given up for balance
        self.sessions = Sessions()

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, now: float) -> list[Reason]:
        scene = build_scene(query, candidates, prefix, self._settings)
        reasons = costs(query, candidates, scene)
        preference = self._preference(query, candidates, scene, reasons, now, prefix.totals is not None)
        if preference is not None:
            prefer(reasons, preference)
        return reasons

    def ranker(
        self, query: RouteQuery, candidates: Sequence[Candidate], totals: PoolTotals
    ) -> Callable[[Candidate], float]:
        scene = build_scene(query, candidates, PrefixInfo(totals=totals), self._settings)
        return lambda one: costs(query, (one,), scene)[0].cost_s

    def must_score(
        self, query: RouteQuery, members: Collection[Member], prefix: PrefixInfo, is_known: bool, now: float
    ) -> Iterable[WorkerId]:
        """Return a session's home. For a new session, the workers with room that its hash prefers."""
        if query.session is None:
            return ()
        homes = self.sessions.homes(query.session, now)
        if homes or (is_known and prefix.branches < 2):
            return homes
        alive = self.sessions.alive([member.worker_id for member in members], now)
        share = (sum(alive) + 1) / sum(member.weight for member in members)
        session = query.parent_session or query.session
        with_room = [
            (member.spec.worker_id, member.spec.weight)
            for member, count in zip(members, alive, strict=True)
            if count + 1 <= ceil(share * member.weight)
        ]
        return nearest(session, with_room, _PREFERRED_HOMES)

    def commit(self, query: RouteQuery, choices: Sequence[LegChoice], now: float) -> None:
        spare_tokens = self._spare_tokens * (1 - 1 / _BUDGET_REQUESTS) + self._settings.balance_share * query.num_tokens
        for choice in choices:
            spare_tokens -= choice.reasons[choice.chosen].spent_tokens
        self._spare_tokens = spare_tokens
        if query.session is not None:
            chosen = [choice.candidates[choice.chosen].worker_id for choice in choices]
            workers = [one.worker_id for choice in choices for one in choice.candidates]
            self.sessions.placed(query.session, chosen, workers, now)

    def _preference(
        self,
        query: RouteQuery,
        candidates: Sequence[Candidate],
        scene: Scene,
        reasons: Sequence[Reason],
        now: float,
        is_part: bool,
    ) -> Preference | None:
        """Apply the placement rule for this request, if there is one. `is_part`: there are more workers than candidates."""
        if query.session is None:
            if scene.idle and scene.most_cached:
                return relieve(query, candidates, scene, reasons, self._spare_tokens)
            return None
        workers = [one.worker_id for one in candidates]
        home = self.sessions.home(query.session, workers, now)
        if home is None:
            if scene.continues:
                return None
            alive = self.sessions.alive(workers, now)
            total, most = (self.sessions.total, self.sessions.most) if is_part else (sum(alive), max(alive))
            return find_home(query, candidates, scene, reasons, alive, total, most)
        if not scene.idle:
            return None
        further = self.sessions.mean_requests
        at = workers.index(home)
        if is_exceeded(candidates, at, further, self.sessions.counter(now)):
            return None
        alive = self.sessions.alive(workers, now)
        expected = None
        if is_part:
            expected = scene.mean_requests * scene.weight + further * self.sessions.total
        return even_out(candidates, scene, reasons, alive, at, further, self._spare_tokens, query.num_tokens, expected)
