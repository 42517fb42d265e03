"""The default policy: seconds."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.routing.hashing import rendezvous
from stoker.routing.policy import POLICIES, Candidate, RouterSettings
from stoker.routing.query import Reason, RouteQuery


@POLICIES.register("cost")
class Cost:
    in_seconds = True

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings.cost
        self._spare_tokens = 0.0
        self.moves = 0

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], now: float) -> list[Reason]:
        settings = self._settings
        reasons = []
        count = len(candidates)
        most_cached = max([one.cached_tokens for one in candidates])
        requests = sum([one.load.recent_requests for one in candidates])
        returns = sum([one.load.recent_returns for one in candidates])
        mean_requests = requests / count
        mean_tokens = sum([one.load.recent_tokens for one in candidates]) / count or 1.0
        come_back = returns / requests if requests else 0.0
        n = candidates[0].branches
        factor = settings.move_factor / max(1, n * n)
        per_s = settings.returns_weight * come_back / settings.tau_s
        self._spare_tokens = min(self._spare_tokens + settings.balance_share * query.num_tokens, mean_tokens)
        bound = max(settings.bound_requests, settings.bound * mean_requests)
        over = None
        if n < 2 and most_cached and sum([one.load.mean_queued_tokens / one.tokens_per_s for one in candidates]) < 0.1 * count:
            for one in candidates:
                if one.cached_tokens == most_cached and one.load.recent_requests - mean_requests > bound and one.load.recent_tokens > (1 + settings.bound) * mean_tokens:
                    over = one
        for one in candidates:
            load, rate = one.load, one.tokens_per_s
            queue_s = load.queued_tokens / rate
            compute_s = one.compute_tokens / rate
            fetch_s = one.host_tokens / settings.host_tokens_per_s + one.disk_tokens / settings.disk_tokens_per_s
            fetch_s += one.pull_tokens / settings.pull_tokens_per_s
            crowd = (load.context_tokens + load.output_tokens + one.context_tokens) / settings.crowd_tokens
            decode_s = one.output_tokens * one.step_s * (1 + crowd)
            kv_s = settings.kv_pressure_s * one.member.kv_used / max(0.02, 1 - one.member.kv_used)
            decoding = load.requests - len(load._prefilling)
            others_s = compute_s * settings.stall_share * decoding
            others_s += per_s * load.recent_requests * compute_s * (queue_s + compute_s / 2)
            later_s = settings.later_weight * load.mean_queued_tokens / rate
            recent_s = compute_s * (load.recent_tokens / mean_tokens - 1.0) * settings.recent_weight
            recent_s += settings.request_s * (load.recent_requests - mean_requests)
            lost = most_cached - one.cached_tokens
            move_s = factor * lost / rate
            if over is not None:
                if one is over:
                    recent_s += settings.bound_s
                elif lost <= self._spare_tokens and lost <= settings.balance_part * query.num_tokens and load.recent_requests < mean_requests:
                    move_s = 0.0
                else:
                    recent_s += settings.bound_s
            cost_s = one.prefill_s + queue_s + compute_s + fetch_s + decode_s + kv_s + others_s + recent_s + move_s + later_s
            reasons.append(
                Reason(
                    one.worker_id,
                    cost_s,
                    one.cached_tokens,
                    "decode" if one.pull_tokens else "whole",
                    one.prefill_s,
                    queue_s,
                    compute_s,
                    fetch_s,
                    decode_s,
                    kv_s,
                    others_s,
                    recent_s,
                    move_s,
                )
            )
        best = min(range(count), key=lambda j: reasons[j].cost_s)
        if over is not None and candidates[best] is not over:
            self._spare_tokens -= most_cached - candidates[best].cached_tokens
            self.moves += 1
        if query.session is not None and (n >= 2 or not most_cached):
            least = min(r.cost_s - r.recent_s for r in reasons)
            fit = [j for j in range(count) if candidates[j].load.recent_requests <= (1 + settings.home_bound) * mean_requests + 1 and reasons[j].cost_s - reasons[j].recent_s <= least + 2 * settings.request_s]
            if fit:
                home = min(fit, key=lambda j: rendezvous(query.parent_session or query.session, candidates[j].worker_id, candidates[j].member.spec.weight))
                reasons[home].cost_s = min(reasons[home].cost_s, reasons[best].cost_s - 1e-9)
        return reasons
