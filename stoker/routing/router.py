"""Router: a query in, a Route out. Choosing and reserving is one step, so that a burst does not pile onto one worker.

Candidates are the usable members for the model, in the request's home cluster; the policy gives each a cost, and the
least wins. In a fleet with prefill and decode workers, the cheapest prefill worker is found first; every decode worker is
then a candidate with a hand-off from it, and one without: it computes the prompt itself, which is cheaper when little of
it is uncached there or when prefill is the busier side. Unified workers stand beside them as whole routes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.load_book import LoadBook, WorkerLoad
from stoker.fleet.prefix_index import Match, PrefixIndex
from stoker.fleet.spec import Role
from stoker.routing.cluster import ClusterLevel
from stoker.routing.policy import POLICIES, Candidate, Policy, RouterSettings
from stoker.routing.query import Leg, ModelNotFound, NoWorker, Reason, Route, RouteQuery

_MAX_CANDIDATES = 4096


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


_Decision = tuple[float, str, str | None, int, Route]  # when, model, session, prompt tokens, and what came of it


@dataclass(slots=True)
class _Asked:
    """A query, and what the index knows about it."""

    query: RouteQuery
    matches: Mapping[WorkerId, Match]
    index: PrefixIndex
    now: float
    branches: int = 0  # how many ways conversations went on from the last block that anybody has of this one
    evicting: float = 1.0  # 0..1, whether what comes pushes out what is there


@dataclass(frozen=True, slots=True)
class _Prefill:
    candidate: Candidate
    cost_s: float


class Router:
    def __init__(
        self,
        fleet: Fleet,
        load_book: LoadBook,
        indexes: PrefixIndexes,
        policy: Policy | None = None,
        settings: RouterSettings | None = None,
    ) -> None:
        self._settings = settings or RouterSettings()
        self._fleet = fleet
        self._load_book = load_book
        self._indexes = indexes
        self._policy = policy or POLICIES.get(self._settings.policy)(self._settings)
        self._clusters = ClusterLevel(load_book, self._settings.cluster_spill_s)
        self._candidates: dict[WorkerId, Candidate] = {}
        self._decisions: deque[_Decision] = deque(maxlen=self._settings.num_explained)

    def route(self, query: RouteQuery, now: float) -> Route:
        """Raises ModelNotFound, or NoWorker with the time after which it is worth trying again."""
        pool = self._fleet.pool(query.model, now)
        members: Sequence[Member] = pool.members
        if query.excluded or query.needs_dialect is not None:
            members = [member for member in members if _fits(member, query)]
        if not members:
            raise self._no_worker(query, now)
        index = self._indexes[query.model]
        matches = index.match(query.keys) if query.matches is None else query.matches
        asked = _Asked(query, matches, index, now, 0, index.evicting)
        if matches:
            most_blocks = max([match.blocks for match in matches.values()])
            asked.branches = index.branches(query.keys[most_blocks - 1])
        prefills: dict[str, _Prefill] = {}
        reasons: list[Reason] = []
        if pool.plain:
            output_tokens = self._output_tokens(query)
            candidates = [self._candidate(asked, member, output_tokens) for member in members]
        else:
            members = self._clusters.narrow(query, members, matches, now)
            prefills, reasons = self._cheapest_prefills(asked, members)
            candidates = self._ways(asked, members, prefills)
            if not candidates:
                raise self._no_worker(query, now)
        scored = self._policy.score(query, candidates, now)
        chosen = candidates[_least(scored)]
        returning = bool(matches) and chosen.cached_tokens > min([one.cached_tokens for one in candidates])
        decode = self._reserve(chosen, asked, returning)
        first = None
        if chosen.pull_tokens:
            first = self._reserve(prefills[chosen.member.spec.dialect].candidate, asked, returning)
        route = Route(decode, first, self._settings.policy, reasons + scored if reasons else scored)
        self._decisions.append((now, query.model, query.session, query.num_tokens, route))
        return route

    def explain_last(self, count: int) -> list[dict[str, object]]:
        """The last decisions, the latest first."""
        latest = list(self._decisions)[-count:] if count > 0 else []
        return [_as_dict(decision) for decision in reversed(latest)]

    # ---- the ways to run a request

    def _cheapest_prefills(self, asked: _Asked, members: Sequence[Member]) -> tuple[dict[str, _Prefill], list[Reason]]:
        """By dialect: workers hand over to those of their own kind alone."""
        by_dialect: dict[str, list[Candidate]] = {}
        for member in members:
            if member.spec.role is Role.PREFILL:
                by_dialect.setdefault(member.spec.dialect, []).append(self._candidate(asked, member, 0))
        cheapest, reasons = {}, []
        for dialect, candidates in by_dialect.items():
            scored = self._policy.score(asked.query, candidates, asked.now)
            best = _least(scored)
            cheapest[dialect] = _Prefill(candidates[best], scored[best].cost_s)
            reasons += [reason._replace(part="prefill") for reason in scored]
        return cheapest, reasons

    def _ways(self, asked: _Asked, members: Sequence[Member], prefills: Mapping[str, _Prefill]) -> list[Candidate]:
        settings, output_tokens = self._settings, self._output_tokens(asked.query)
        ways = []
        for member in members:
            role = member.spec.role
            if role is Role.PREFILL:
                continue
            way = self._candidate(asked, member, output_tokens)
            alone = role is Role.UNIFIED or member.spec.decodes_alone
            least = settings.local_prefill_tokens if alone else 0
            prefill = prefills.get(member.spec.dialect)
            hands_off = role is Role.DECODE and prefill is not None and way.compute_tokens > least
            if hands_off and prefill is not None:
                ways.append(replace(way, compute_tokens=0, pull_tokens=way.compute_tokens, prefill_s=prefill.cost_s))
                way.prefill_s = settings.local_prefill_share * way.compute_tokens / member.tokens_per_s
            if alone and (not hands_off or self._policy.in_seconds):
                ways.append(way)
        return ways

    def _output_tokens(self, query: RouteQuery) -> int:
        """To be expected."""
        usual, most = self._settings.expected_output_tokens, query.max_output_tokens
        return usual if most is None or most > usual else most

    def _candidate(self, asked: _Asked, member: Member, output_tokens: int) -> Candidate:
        query, worker_id, rate = asked.query, member.spec.worker_id, member.tokens_per_s
        load = self._load_book.load(worker_id, asked.now, rate)
        # One object a worker, used for one choice after the other: making it anew would take longer than scoring it.
        way = self._candidates.get(worker_id)
        if way is None:
            way = self._new_candidate(member)
        way.member = member
        way.load = load
        queued, report = load.queued_tokens, member.report
        if report is not None and report.waiting_tokens > queued:  # there are other gateways
            queued = max(queued, report.waiting_tokens - (asked.now - member.reported_at) * rate)
        way.queued_tokens = queued
        match = asked.matches.get(worker_id)
        if match is None:
            cached = way.host_tokens = way.disk_tokens = 0
        else:
            # The last prompt token is computed anew, always: its logits are what the first token is drawn from.
            cached = min(match.blocks * query.block_tokens, query.num_tokens - 1)
            way.host_tokens = match.host_blocks * query.block_tokens
            way.disk_tokens = match.disk_blocks * query.block_tokens
        way.cached_tokens = cached
        way.context_tokens = query.num_tokens
        way.compute_tokens = query.num_tokens - cached
        way.output_tokens = output_tokens
        way.branches = asked.branches
        way.evicting = asked.evicting
        way.prefill_s = 0.0
        return way

    def _new_candidate(self, member: Member) -> Candidate:
        if len(self._candidates) >= _MAX_CANDIDATES:  # most of them have left the fleet
            self._candidates.clear()
        way = self._candidates[member.worker_id] = Candidate(member, member.worker_id, WorkerLoad())
        return way

    def _reserve(self, candidate: Candidate, asked: _Asked, returning: bool) -> Leg:
        worker_id, now = candidate.worker_id, asked.now
        reservation = self._load_book.reserve(
            worker_id,
            prefill_tokens=candidate.compute_tokens,
            context_tokens=candidate.context_tokens,
            output_tokens=candidate.output_tokens,
            returning=returning,
            now=now,
        )
        asked.index.routed(worker_id, asked.query.keys, now)
        self._fleet.begin_request(candidate.member, now)
        return Leg(candidate.member, reservation, candidate.cached_tokens)

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


def _as_dict(decision: _Decision) -> dict[str, object]:
    at, model, session, num_tokens, route = decision
    return {
        "at": at,
        "model": model,
        "session": session,
        "num_tokens": num_tokens,
        "decode": route.decode.worker.worker_id,
        "prefill": route.prefill.worker.worker_id if route.prefill else None,
        "policy": route.policy,
        "reasons": [reason.as_dict() for reason in route.reasons],
    }


def _least(reasons: list[Reason]) -> int:
    """The first of the cheapest."""
    costs = [reason.cost_s for reason in reasons]
    return costs.index(min(costs))
