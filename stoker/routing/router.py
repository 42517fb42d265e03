"""Router: a query in, a Route out. Choosing and reserving is one step, so that a burst does not pile onto one worker.

Candidates are the usable members for the model, in the request's home cluster; the policy gives each a cost, and the
least wins. In a fleet with prefill and decode workers, the cheapest prefill worker is found first; every decode worker is
then a candidate with a hand-off from it, and one without: it computes the prompt itself, which is cheaper when little of
it is uncached there or when prefill is the busier side. Unified workers stand beside them as whole routes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.ledger import Ledger
from stoker.fleet.prefix_index import SHARED, Match, PrefixIndex
from stoker.fleet.spec import Role
from stoker.routing.cluster import ClusterLevel
from stoker.routing.policy import POLICIES, Candidate, Policy, RouterSettings
from stoker.routing.query import Leg, ModelNotFound, NoWorker, Reason, Route, RouteQuery

_ALL = frozenset(Role)
_NO_MATCH = Match()
_NO_INDEX = PrefixIndex()


class PrefixIndexes(dict[str, PrefixIndex]):
    """An index for each model, made when it is first asked for."""

    def __init__(self, max_entries: int = 2_000_000) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __missing__(self, model: str) -> PrefixIndex:
        index = self[model] = PrefixIndex(self._max_entries)
        return index

    def forget(self, worker_id: WorkerId) -> None:
        """The worker has left the fleet."""
        for index in self.values():
            index.forget(worker_id)


@dataclass(frozen=True, slots=True)
class _Decision:
    """What `explain_last` shows of a route, without holding on to its conversation and its reservations."""

    at: float
    model: str
    session: str | None
    num_tokens: int
    decode: WorkerId
    prefill: WorkerId | None
    policy: str
    reasons: list[Reason]

    def as_dict(self) -> dict[str, object]:
        return {
            "at": self.at,
            "model": self.model,
            "session": self.session,
            "num_tokens": self.num_tokens,
            "decode": self.decode,
            "prefill": self.prefill,
            "policy": self.policy,
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True, slots=True)
class _Prefill:
    candidate: Candidate
    cost_s: float


class Router:
    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        indexes: PrefixIndexes,
        policy: Policy | None = None,
        settings: RouterSettings | None = None,
    ) -> None:
        self._settings = settings or RouterSettings()
        self._fleet = fleet
        self._ledger = ledger
        self._indexes = indexes
        self._policy = policy or POLICIES.get(self._settings.policy)(self._settings)
        self._clusters = ClusterLevel(fleet, ledger, self._settings.cluster_spill_s)
        self._decisions: deque[_Decision] = deque(maxlen=self._settings.num_explained)

    def route(self, query: RouteQuery, now: float) -> Route:
        """Raises ModelNotFound, or NoWorker with the time after which it is worth trying again."""
        members: Sequence[Member] = self._fleet.candidates(query.model, _ALL, now)
        if query.excluded or query.needs_dialect is not None:
            members = [member for member in members if _fits(member, query)]
        index = self._indexes[query.model] if members else _NO_INDEX
        matches = index.match(query.keys)
        members = self._clusters.narrow(query, members, matches, now)
        prefill, reasons = self._cheapest_prefill(query, members, matches, now)
        candidates = self._ways(query, members, matches, prefill, now)
        if not candidates:
            raise self._no_worker(query, now)
        depth = max((m.blocks for m in matches.values()), default=0)
        branches = index.branches(query.keys[depth - 1]) if depth else 2
        for one in candidates:
            one.branches = branches
        scored = self._policy.score(query, candidates, now)
        chosen = candidates[_least(scored)]
        legs = [chosen] if prefill is None or not chosen.pull_tokens else [chosen, prefill.candidate]
        for leg in legs:
            index.routed(leg.worker_id, query.keys, now)
        returning = chosen.cached_tokens > min(candidate.cached_tokens for candidate in candidates)
        decode, *others = [self._reserve(leg, returning, now) for leg in legs]
        route = Route(decode, others[0] if others else None, self._settings.policy, reasons + scored)
        self._explain(query, route, now)
        return route

    def explain_last(self, count: int) -> list[dict[str, object]]:
        """The last decisions, the latest first."""
        latest = list(self._decisions)[-count:] if count > 0 else []
        return [decision.as_dict() for decision in reversed(latest)]

    def note_prefill_rate(self, worker_id: WorkerId, uncached_tokens: int, seconds: float, now: float) -> None:
        """A prompt's uncached part took so long there, from sending to the first token."""
        self._fleet.saw_prefill(worker_id, uncached_tokens, seconds)

    def _explain(self, query: RouteQuery, route: Route, now: float) -> None:
        prefill = route.prefill.charge.worker_id if route.prefill else None
        decode = route.decode.charge.worker_id
        self._decisions.append(
            _Decision(now, query.model, query.session, query.num_tokens, decode, prefill, route.policy, route.reasons)
        )

    # ---- the ways to run a request

    def _cheapest_prefill(
        self, query: RouteQuery, members: Sequence[Member], matches: dict[WorkerId, Match], now: float
    ) -> tuple[_Prefill | None, list[Reason]]:
        those = [member for member in members if member.spec.role is Role.PREFILL]
        if not those:
            return None, []
        candidates = [self._candidate(query, member, matches, now, output_tokens=0) for member in those]
        scored = self._policy.score(query, candidates, now)
        for reason in scored:
            reason.part = "prefill"
        best = _least(scored)
        return _Prefill(candidates[best], scored[best].cost_s), scored

    def _ways(
        self,
        query: RouteQuery,
        members: Sequence[Member],
        matches: dict[WorkerId, Match],
        prefill: _Prefill | None,
        now: float,
    ) -> list[Candidate]:
        settings = self._settings
        output_tokens = settings.expected_output_tokens
        if query.max_output_tokens is not None and query.max_output_tokens < output_tokens:
            output_tokens = query.max_output_tokens
        ways = []
        for member in members:
            role = member.spec.role
            if role is Role.PREFILL:
                continue
            way = self._candidate(query, member, matches, now, output_tokens)
            hands_off = (
                role is Role.DECODE and prefill is not None and way.compute_tokens > settings.local_prefill_tokens
            )
            if hands_off and prefill is not None:
                ways.append(replace(way, compute_tokens=0, pull_tokens=way.compute_tokens, prefill_s=prefill.cost_s))
                way.prefill_s = settings.local_prefill_share * way.compute_tokens / way.tokens_per_s
            if not hands_off or self._policy.in_seconds:
                ways.append(way)
        return ways

    def _candidate(
        self, query: RouteQuery, member: Member, matches: dict[WorkerId, Match], now: float, output_tokens: int
    ) -> Candidate:
        worker_id = member.spec.worker_id
        match, block = matches.get(worker_id) or matches.get(SHARED, _NO_MATCH), query.block_tokens
        # The last prompt token is computed anew, always: its logits are what the first token is drawn from.
        cached = min(match.blocks * block, query.num_tokens - 1)
        rate = self._fleet.prefill_rate(member)
        return Candidate(
            member,
            worker_id,
            self._ledger.load(worker_id, now, rate),
            rate,
            self._fleet.step_s(member),
            cached,
            match.host_blocks * block,
            match.disk_blocks * block,
            query.num_tokens - cached,
            0,
            query.num_tokens,
            output_tokens,
        )

    def _reserve(self, candidate: Candidate, returning: bool, now: float) -> Leg:
        charge = self._ledger.charge(
            candidate.worker_id,
            prefill_tokens=candidate.compute_tokens,
            context_tokens=candidate.context_tokens,
            output_tokens=candidate.output_tokens,
            returning=returning,
            now=now,
        )
        self._fleet.begin_request(candidate.member, now)
        return Leg(candidate.member, charge, candidate.cached_tokens)

    def _no_worker(self, query: RouteQuery, now: float) -> ModelNotFound | NoWorker:
        served = self._fleet.models()
        unknown = [member for member in self._fleet.members() if not member.models]
        if query.model not in served and not unknown:
            names = ", ".join(sorted(served)) or "none"
            return ModelNotFound(f"the model {query.model!r} is not served here; there are: {names}", param="model")
        there = served.get(query.model, unknown)
        wait_s = self._fleet.usable_in_s(query.model, now)
        message = f"none of the {len(there)} workers of {query.model!r} can take this request now"
        if query.excluded:
            message += f"; {len(query.excluded)} failed it already"
        return NoWorker(message, retry_after_s=max(1.0, wait_s if wait_s is not None else 5.0))


def _fits(member: Member, query: RouteQuery) -> bool:
    if member.spec.worker_id in query.excluded:
        return False
    return query.needs_dialect is None or member.spec.dialect in query.needs_dialect


def _least(reasons: list[Reason]) -> int:
    """The first of the cheapest."""
    costs = [reason.cost_s for reason in reasons]
    return costs.index(min(costs))
