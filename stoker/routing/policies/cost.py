"""The default policy: seconds until the first token there, and what the choice costs everybody else.

    cost = queue + compute + fetch + decode + KV pressure      this request's own time on the worker
         + others                                              those who come back to the worker and find it busy
         + later                                               this conversation's next turns, in the worker's usual queue
         + recent                                              more than its part of the recent work
         + move                                                what another worker holds and would be computed again

**Others.** Requests with a cached conversation come back to their worker at some rate r. A prompt of S seconds behind a
queue of B delays those that come meanwhile by r S (B + S/2) in all. Long prompts therefore gather on workers that few
return to, and short ones, with their many sessions, keep away from there. **Later** does the other half of that: a new
conversation prefers workers whose queue is short on average, not just now, for as many turns as conversations had of late:
of recent requests, those that came back for each that did not. A prompt that leaves no block of its own has none to come.

**Move.** A conversation that continues (its last known block has not been continued differently) pays `move_factor` times
what it would lose elsewhere: its hits are worth more than its own wait, since work done twice delays all. Where many
conversations went on from the last known block, that block ends a common prefix, such as a system prompt; computing it on
one more worker is an investment, the more so the more branches there are. A conversation that was evicted, or is new, is
free.

**Recent.** Decaying requests and tokens say who had more than its part. Tokens weigh with the prompt's length, as far as
they push other conversations out of caches: not at all while caches are known to have room. Requests decide between idle
workers, where every queue is empty at every pick. In an idle fleet a worker that is over its bound also gives conversations
away: new ones on a common prefix at once, others if they lose little, and never more than `balance_share` of all tokens.

**Sessions.** Prefixes find the way back by themselves. A session key says which conversations are alive, and so what is to
come. A *new* session goes to a worker with room, that is, not more living sessions than its part; among those that are
about as good (in an idle fleet: within `even_s` for each session that another has more) by rendezvous hash, so that
gateways agree without talking. Sessions then turn out to be short or long. In an idle fleet, one leaves the worker that
will have the most requests, had and to come (a living session is taken to ask once more as often as sessions did so far),
for the one that will have the least. What it loses comes out of the same `balance_share`, of which a move may take
`move_share` times the excess: a small excess moves none but a young session, and one that would lose nearly all stays.

Nobody waits longer than `balance_s` for balance, with a session or without: what would take longer to compute again stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

from stoker.routing.hashing import rendezvous
from stoker.routing.policy import POLICIES, Candidate, RouterSettings
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.sessions import Sessions

_make = tuple.__new__  # Reason(…) and _Scene(…) without their argument names: several times as fast


class _Scene(NamedTuple):
    """What is the same for all candidates of a request."""

    most_cached: int
    compute_s: float  # at least, wherever it goes
    returning: float  # share of the recent requests that came for what only one worker has
    requests: float  # recent ones, for a unit of weight
    tokens: float
    later_turns: float  # of this conversation, to be expected
    recent_weight: float  # 0 where nobody has to make room, or where all share a store
    move_factor: float
    continues: bool  # a known conversation's next turn
    idle: bool  # queues say nothing


@POLICIES.register("cost")
class Cost:
    in_seconds = True

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings.cost
        self._spare_tokens = 0.0  # what may be computed again for the sake of balance
        self._sessions = Sessions()

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], now: float) -> list[Reason]:
        scene = self._scene(query, candidates)
        reasons = self._reasons(scene, candidates)
        if query.session is not None:
            self._place_session(query.session, query.parent_session, scene, candidates, reasons, now)
        elif scene.idle and scene.most_cached:
            self._balance(query, scene, candidates, reasons)
        return reasons

    def _scene(self, query: RouteQuery, candidates: Sequence[Candidate]) -> _Scene:
        settings, branches, evicting = self._settings, candidates[0].branches, candidates[0].evicting
        most_cached, compute_s = 0, inf
        requests = returns = tokens = queue_s = weight = 0.0
        for one in candidates:
            load, rate, cached = one.load, one.member.tokens_per_s, one.cached_tokens
            requests += load.recent_requests
            returns += load.recent_returns
            tokens += load.recent_tokens
            queue_s += load.mean_queued_tokens / rate
            weight += one.member.weight
            own_s = one.compute_tokens / rate
            if cached > most_cached:
                most_cached = cached
            if own_s < compute_s:
                compute_s = own_s
        self._spare_tokens = min(self._spare_tokens + settings.balance_share * query.num_tokens, tokens)
        returning = returns / requests if requests else 0.0
        private = min(1.0, 3 * returning)  # whether it matters who holds what: with a store that all share, it does not
        continues = most_cached > 0 and branches < 2
        later_turns = settings.later_turns
        if not continues:
            if len(query.keys) * query.block_tokens - most_cached < query.block_tokens:
                later_turns = 0.0  # it leaves no block of its own, so nothing will come back to it
            else:
                had = returns / max(requests - returns, 1e-9)
                later_turns = min(max(had, later_turns), settings.most_later_turns)
        scene = (
            most_cached,
            compute_s,
            returning,
            requests / weight,
            (tokens + 1) / weight,
            private * later_turns,
            private * settings.recent_weight * evicting,
            settings.move_factor / (branches * branches) if branches > 1 else settings.move_factor,
            continues,
            queue_s < settings.idle_queue_s * len(candidates),
        )
        return _make(_Scene, scene)

    def _reasons(self, scene: _Scene, candidates: Sequence[Candidate]) -> list[Reason]:
        """The cost of every candidate. On the path of every request: what is the same for all is worked out once, and what is
        nothing for all is not worked out."""
        settings = self._settings
        most_cached, move_factor = scene.most_cached, scene.move_factor
        stall_share, crowd_tokens = settings.stall_share, settings.crowd_tokens
        returns_per_s = settings.returns_weight * scene.returning * candidates[0].load.decay_per_s
        later_turns = scene.later_turns
        recent_s_for_tokens = scene.recent_weight * scene.compute_s
        recent_s_for_requests = settings.request_s if scene.idle else 0.0
        mean_requests, mean_tokens = scene.requests, scene.tokens
        reasons = []
        for one in candidates:
            load, member = one.load, one.member
            rate = member.tokens_per_s
            queue_s = one.queued_tokens / rate
            compute_s = one.compute_tokens / rate
            decode_s = fetch_s = kv_s = later_s = recent_s = move_s = 0.0
            output_tokens, pull_tokens, prefill_s = one.output_tokens, one.pull_tokens, one.prefill_s
            if output_tokens:
                crowd = load.context_tokens + load.output_tokens + one.context_tokens
                decode_s = output_tokens * member.step_s * (1 + crowd / crowd_tokens)
            if pull_tokens or one.host_tokens or one.disk_tokens:
                fetch_s = self._fetch_s(one)
            used = member.kv_used
            if used:
                kv_s = settings.kv_pressure_s * used / max(0.02, 1 - used)
            others = stall_share * load.decoding
            if returns_per_s:
                others += returns_per_s * load.recent_requests * (queue_s + compute_s / 2)
            others_s = compute_s * others
            if later_turns:
                later_s = later_turns * load.mean_queued_tokens / rate
            if recent_s_for_tokens:
                recent_s = recent_s_for_tokens * ((load.recent_tokens + 1) / (mean_tokens * member.weight + 1) - 1)
            if recent_s_for_requests:
                recent_s += recent_s_for_requests * (load.recent_requests - mean_requests * member.weight)
            cached = one.cached_tokens
            if cached != most_cached:
                move_s = move_factor * (most_cached - cached) / rate
            own_s = prefill_s + queue_s + compute_s + fetch_s + decode_s + kv_s
            cost_s = own_s + others_s + later_s + recent_s + move_s
            part = "decode" if pull_tokens else "whole"
            why = (
                one.worker_id, cost_s, cached, part,
                prefill_s, queue_s, compute_s, fetch_s, decode_s, kv_s,
                others_s, later_s, recent_s, move_s,
            )  # fmt: skip
            reasons.append(_make(Reason, why))
        return reasons

    def _fetch_s(self, one: Candidate) -> float:
        settings = self._settings
        from_tiers_s = one.host_tokens / settings.host_tokens_per_s + one.disk_tokens / settings.disk_tokens_per_s
        return from_tiers_s + one.pull_tokens / settings.pull_tokens_per_s

    def _balance(
        self, query: RouteQuery, scene: _Scene, candidates: Sequence[Candidate], reasons: list[Reason]
    ) -> None:
        """If the best worker is over its bound, let those below their part compete without the price of moving."""
        settings = self._settings
        costs = [reason.cost_s for reason in reasons]
        best = candidates[costs.index(min(costs))]
        fair = scene.requests * best.member.weight
        if best.load.recent_requests - fair <= max(settings.bound_requests, settings.bound * fair):
            return
        # A common prefix is computed once more for all who will share it; a conversation's own tail is a loss.
        most, most_s = inf, inf
        if scene.continues:
            most, most_s = min(self._spare_tokens, settings.balance_part * query.num_tokens), settings.balance_s
        for at, one in enumerate(candidates):
            lost = scene.most_cached - one.cached_tokens
            is_worth_it = lost <= min(most, most_s * one.member.tokens_per_s)
            if is_worth_it and one.load.recent_requests < scene.requests * one.member.weight:
                reasons[at] = _cheaper(reasons[at]._replace(move_s=0.0), reasons[at].move_s, settings.over_bound_s)
        if scene.continues:
            chosen = min(reasons, key=lambda reason: reason.cost_s)
            self._spare_tokens -= scene.most_cached - chosen.cached_tokens

    # ---- sessions

    def _place_session(
        self,
        session: str,
        parent: str | None,
        scene: _Scene,
        candidates: Sequence[Candidate],
        reasons: list[Reason],
        now: float,
    ) -> None:
        workers = [one.worker_id for one in candidates]
        alive = [self._sessions.alive(worker, now) for worker in workers]
        home = self._sessions.home(session, workers)
        if home is None and not scene.continues:
            self._find_home(parent or session, scene, candidates, reasons, alive)
        elif home is not None and scene.idle:
            self._even_out(workers.index(home), candidates, reasons, alive)
        chosen = min(reasons, key=lambda reason: reason.cost_s)
        self._sessions.placed(session, chosen.worker_id, workers, now)

    def _find_home(
        self,
        session: str,
        scene: _Scene,
        candidates: Sequence[Candidate],
        reasons: list[Reason],
        alive: Sequence[int],
    ) -> None:
        settings = self._settings
        part = (sum(alive) + 1) / sum(one.member.weight for one in candidates)
        # In an idle fleet a common prefix may be computed where few are, for those that will come there.
        even_s = settings.even_s if scene.idle else 0.0
        costs_s = [reason.cost_s - reason.recent_s - (reason.move_s if scene.idle else 0.0) for reason in reasons]
        best_s, most = min(costs_s), max(alive)
        homes = [
            (rendezvous(session, one.worker_id, one.member.spec.weight), at)
            for at, one in enumerate(candidates)
            if costs_s[at] <= best_s + max(settings.home_slack_s, even_s * (most - alive[at]))
            and alive[at] + 1 <= max(ceil(part * one.member.weight), (1 + settings.bound) * part * one.member.weight)
        ]
        if homes:
            _prefer(reasons, min(homes)[1])

    def _even_out(
        self, home: int, candidates: Sequence[Candidate], reasons: list[Reason], alive: Sequence[int]
    ) -> None:
        """If the home will have the most requests of all, let the session go to where there will be the least."""
        settings, further = self._settings, self._sessions.mean_requests
        in_all = [one.load.recent_requests + further * n for one, n in zip(candidates, alive, strict=True)]
        part = sum(in_all) / sum(one.member.weight for one in candidates)
        excess = [n / (part * one.member.weight) - 1 for one, n in zip(candidates, in_all, strict=True)]
        least = excess.index(min(excess))
        # Where nothing is lost, as with a store that all share, cost has decided already.
        lost = candidates[home].cached_tokens - candidates[least].cached_tokens
        most = min(
            min(1.0, settings.move_share * excess[home]) * self._spare_tokens,
            settings.move_part * candidates[home].context_tokens,
            settings.balance_s * candidates[least].member.tokens_per_s,
        )
        if (
            0 < lost <= most
            and excess[home] == max(excess)
            and in_all[home] - in_all[least] > max(further, settings.bound_requests)
            and reasons[least].queue_s - reasons[home].queue_s <= settings.even_s
        ):
            _prefer(reasons, least)
            self._spare_tokens -= lost


def _prefer(reasons: list[Reason], at: int) -> None:
    """Make it the cheapest, if only just."""
    ahead_s = reasons[at].cost_s - min(reason.cost_s for reason in reasons)
    reasons[at] = _cheaper(reasons[at], 0.0, ahead_s + 1e-6)


def _cheaper(reason: Reason, by_s: float, recent_s: float) -> Reason:
    return reason._replace(cost_s=reason.cost_s - by_s - recent_s, recent_s=reason.recent_s - recent_s)
