"""Router: takes a RouteQuery and returns a Route. Choosing and reserving is one step, so that a burst spreads out.

The candidates are the usable workers of the model, in the request's home cluster. The policy gives each one a cost, and
the lowest cost wins. In a large pool of unified workers, only those on a shortlist are candidates (shortlist.py).

In a fleet with prefill and decode workers, the cheapest prefill worker is found first. Each decode worker is then a
candidate in two ways: with a hand-off from that prefill worker, and without one. Without a hand-off it prefills itself,
which is cheaper when little of the prompt is uncached there, or when the prefill workers are busier. Unified workers are
candidates as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.load_book import LoadBook, WorkerLoad
from stoker.fleet.lost_blocks import BlockLosses
from stoker.fleet.prefix_index import PrefixIndex
from stoker.fleet.prefix_matches import NO_MATCHES, Match, PrefixMatches
from stoker.fleet.spec import Role
from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.cluster import ClusterLevel
from stoker.routing.policy import POLICIES, LegChoice, Policy
from stoker.routing.query import Leg, ModelNotFound, NoWorker, Reason, Route, RouteQuery
from stoker.routing.settings import RouterSettings
from stoker.routing.shortlist import MIN_WORKERS, Shortlist, ShortlistPolicy

_MAX_CANDIDATES = 4096


class PrefixIndexes(dict[str, PrefixIndex]):
    """One prefix index for each model, created on first use."""

    def __init__(self, max_entries: int = 2_000_000, losses: BlockLosses | None = None) -> None:
        super().__init__()
        self._max_entries = max_entries
        self._losses = losses

    def __missing__(self, model: str) -> PrefixIndex:
        index = self[model] = PrefixIndex(self._max_entries, losses=self._losses)
        return index

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker that has left the fleet from all indexes."""
        for index in self.values():
            index.forget(worker_id)


_Decision = tuple[float, str, str | None, int, Route]  # time, model, session, prompt tokens, result


@dataclass(slots=True)
class _Lookup:
    """A query, and what the prefix index knows about it."""

    query: RouteQuery
    matches: PrefixMatches
    index: PrefixIndex
    prefix: PrefixInfo
    now: float


class Router:
    """Routes requests over the fleet. See the module docstring."""

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
        self._policy = policy or POLICIES.get(self._settings.policy, "routing.policy")(self._settings)
        self._shortlist: Shortlist | None = None  # None: the policy must see all workers
        if isinstance(self._policy, ShortlistPolicy):
            self._shortlist = Shortlist(self._policy, load_book, self._typical)
        self._clusters = ClusterLevel(load_book, self._settings.cluster_spill_s)
        self._candidates: dict[WorkerId, Candidate] = {}
        self._decisions: deque[_Decision] = deque(maxlen=self._settings.num_explained)

    def route(self, query: RouteQuery, now: float) -> Route:
        """Choose the workers of a request and reserve its work there.

        Raises ModelNotFound, or NoWorker with the time after which a retry makes sense.
        """
        pool = self._fleet.pool(query.model, now)
        members: Sequence[Member] = pool.members
        if query.excluded or query.needs_dialect is not None:
            members = [member for member in members if _fits(member, query)]
        if not members:
            raise self._no_worker(query, now)
        lookup = self._look_up(query, now)
        prefills: dict[str, LegChoice] = {}
        if pool.plain:
            if members is pool.members and self._shortlist is not None and len(members) > MIN_WORKERS:
                members = self._shortlist.members(pool, query, lookup.matches, lookup.prefix, now)
                lookup.prefix.totals = self._shortlist.totals(now)
            output_tokens = self._output_tokens(query)
            candidates = self._candidates_of(lookup, members, output_tokens)
        else:
            members = self._clusters.narrow(query, members, lookup.matches, now)
            prefills = {} if query.brings_kv else self._cheapest_prefills(lookup, members)
            candidates = self._decode_candidates(lookup, members, prefills)
            if not candidates:
                raise self._no_worker(query, now)
        choice = self._choose(lookup, candidates)
        chosen, reasons = candidates[choice.chosen], choice.reasons
        cached_tokens = chosen.cached_tokens  # more than on another candidate: the request came for them
        returning = bool(lookup.matches) and any(one.cached_tokens < cached_tokens for one in candidates)
        decode, prefill = self._reserve(chosen, lookup, returning), None
        if chosen.pull_tokens:
            first = prefills[chosen.member.spec.dialect]
            prefill = self._reserve(first.candidates[first.chosen], lookup, returning)
            self._policy.commit(query, (first, choice), now)
        else:
            self._policy.commit(query, (choice,), now)
        if prefills:
            reasons = [*_prefill_reasons(prefills), *reasons]
        route = Route(decode, prefill, self._settings.policy, reasons, lookup.matches, now)
        self._decisions.append((now, query.model, query.session, query.num_tokens, route))
        return route

    def explain_last(self, count: int) -> list[dict[str, object]]:
        """Return the last `count` decisions with their reasons, the latest first."""
        latest = list(self._decisions)[-count:] if count > 0 else []
        return [_as_dict(decision) for decision in reversed(latest)]

    # ---- choosing

    def _look_up(self, query: RouteQuery, now: float) -> _Lookup:
        index = self._indexes[query.model]
        matches = index.match(query.keys) if query.matches is None else query.matches
        branches = 0
        if matches:
            branches = index.branches(query.keys[matches.most_blocks - 1])
        return _Lookup(query, matches, index, PrefixInfo(branches, index.evicting), now)

    def _choose(self, lookup: _Lookup, candidates: Sequence[Candidate]) -> LegChoice:
        """Score the candidates. The first one with the lowest cost is chosen."""
        reasons = self._policy.score(lookup.query, candidates, lookup.prefix, lookup.now)
        costs = [reason.cost_s for reason in reasons]
        return LegChoice(candidates, reasons, costs.index(min(costs)))

    # ---- candidates

    def _cheapest_prefills(self, lookup: _Lookup, members: Sequence[Member]) -> dict[str, LegChoice]:
        """Choose a prefill worker for each dialect: a worker can hand off only to workers of the same dialect."""
        by_dialect: dict[str, list[Candidate]] = {}
        for member in members:
            if member.spec.role is Role.PREFILL:
                by_dialect.setdefault(member.spec.dialect, []).append(self._candidate(lookup, member, 0))
        return {dialect: self._choose(lookup, candidates) for dialect, candidates in by_dialect.items()}

    def _decode_candidates(
        self, lookup: _Lookup, members: Sequence[Member], prefills: Mapping[str, LegChoice]
    ) -> list[Candidate]:
        """Return every way to run the request on a unified or decode worker, with and without a hand-off."""
        settings, output_tokens = self._settings, self._output_tokens(lookup.query)
        ways = []
        for member in members:
            role = member.spec.role
            if role is Role.PREFILL:
                continue
            way = self._candidate(lookup, member, output_tokens)
            alone = role is Role.UNIFIED or member.spec.decodes_alone
            local_tokens = settings.local_prefill_tokens if alone else 0
            prefill = prefills.get(member.spec.dialect)
            hands_off = role is Role.DECODE and prefill is not None and way.compute_tokens > local_tokens
            if hands_off and prefill is not None:
                prefill_s = prefill.reasons[prefill.chosen].cost_s
                ways.append(replace(way, compute_tokens=0, pull_tokens=way.compute_tokens, prefill_s=prefill_s))
                way.prefill_s = settings.local_prefill_share * way.compute_tokens / member.tokens_per_s
            if alone and (not hands_off or self._policy.in_seconds):
                ways.append(way)
        return ways

    def _output_tokens(self, query: RouteQuery) -> int:
        """Return the expected output length."""
        usual, most = self._settings.expected_output_tokens, query.max_output_tokens
        return usual if most is None or most > usual else most

    def _candidate(self, lookup: _Lookup, member: Member, output_tokens: int) -> Candidate:
        return self._candidates_of(lookup, (member,), output_tokens)[0]

    def _candidates_of(self, lookup: _Lookup, members: Sequence[Member], output_tokens: int) -> list[Candidate]:
        """Return what the query would cause on each of these workers. Written as one loop, because it runs for all workers."""
        query, matches, now = lookup.query, lookup.matches, lookup.now
        block_tokens, num_tokens, brings_kv = query.block_tokens, query.num_tokens, query.brings_kv
        known = self._candidates
        last: Match | None = None
        cached, host, disk = num_tokens - 1 if brings_kv else 0, 0, 0  # without a match
        worker_ids = [member.spec.worker_id for member in members]
        loads, found_matches = self._load_book.loads(members, now), matches.of(worker_ids)
        found = []
        for member, worker_id, load, match in zip(members, worker_ids, loads, found_matches, strict=True):
            # One object per worker is reused for all decisions: creating one would take longer than scoring it.
            way = known.get(worker_id)
            if way is None:
                way = self._new_candidate(member)
            way.member = member
            way.load = load
            queued, report = load.queued_tokens, member.report
            if report is not None and report.waiting_tokens > queued:  # from other gateways
                queued = max(queued, report.waiting_tokens - (now - member.reported_at) * member.tokens_per_s)
            way.queued_tokens = queued
            if match is not last:  # workers with equally many blocks most often share one entry
                # The last prompt token is always computed: the first output token is sampled from its logits.
                last, cached = match, 0 if match is None else min(match.blocks * block_tokens, num_tokens - 1)
                host, disk = (0, 0) if match is None else (match.host_blocks, match.disk_blocks)
                if brings_kv:  # it is pulled, not computed
                    cached = num_tokens - 1
            way.host_tokens = host * block_tokens
            way.disk_tokens = disk * block_tokens
            way.cached_tokens = cached
            way.compute_tokens = num_tokens - cached
            way.output_tokens = output_tokens
            way.prefill_s = 0.0
            found.append(way)
        return found

    def _typical(self, query: RouteQuery, member: Member, cached_tokens: int, now: float) -> Candidate:
        """Return a candidate as if it had this many of the prompt's tokens on its device."""
        lookup = _Lookup(query, NO_MATCHES, self._indexes[query.model], PrefixInfo(), now)
        way = self._candidate(lookup, member, self._output_tokens(query))
        way.cached_tokens = cached_tokens
        way.compute_tokens = query.num_tokens - cached_tokens
        return way

    def _new_candidate(self, member: Member) -> Candidate:
        if len(self._candidates) >= _MAX_CANDIDATES:  # most of these workers have left the fleet
            self._candidates.clear()
        way = self._candidates[member.worker_id] = Candidate(member, member.worker_id, WorkerLoad())
        return way

    # ---- reserving

    def _reserve(self, candidate: Candidate, lookup: _Lookup, returning: bool) -> Leg:
        worker_id, query, now = candidate.worker_id, lookup.query, lookup.now
        reservation = self._load_book.reserve(
            worker_id,
            prefill_tokens=candidate.compute_tokens,
            context_tokens=query.num_tokens,
            output_tokens=candidate.output_tokens,
            returning=returning,
            now=now,
        )
        match = lookup.matches.get(worker_id)
        num_confirmed = 0
        if match is not None:
            num_confirmed = lookup.index.num_confirmed(worker_id, query.keys, match.device_blocks)
        lookup.index.routed(worker_id, query.keys, now)
        self._fleet.begin_request(candidate.member, now)
        return Leg(candidate.member, reservation, candidate.cached_tokens, num_confirmed)

    def _no_worker(self, query: RouteQuery, now: float) -> ModelNotFound | NoWorker:
        served = self._fleet.models()
        unknown = [member for member in self._fleet.members() if not member.models]
        if query.model not in served and not unknown:
            names = ", ".join(sorted(served)) or "none"
            return ModelNotFound(f"model {query.model!r} is not served here; served models: {names}", param="model")
        workers = served.get(query.model, unknown)
        wait_s = self._fleet.usable_in_s(query.model, now)
        message = f"none of the {len(workers)} workers of model {query.model!r} can take this request now; retry later"
        if query.excluded:
            message += f" ({len(query.excluded)} workers have already failed it)"
        return NoWorker(message, retry_after_s=max(1.0, wait_s if wait_s is not None else 5.0))


def _fits(member: Member, query: RouteQuery) -> bool:
    if member.spec.worker_id in query.excluded:
        return False
    return query.needs_dialect is None or member.spec.dialect in query.needs_dialect


def _prefill_reasons(prefills: Mapping[str, LegChoice]) -> list[Reason]:
    return [reason._replace(part="prefill") for choice in prefills.values() for reason in choice.reasons]


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
