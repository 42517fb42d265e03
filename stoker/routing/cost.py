"""The routing cost: how many seconds it costs to run a request on a candidate.

`costs(query, candidates, scene)` gives each candidate a sum of named terms, all in seconds. It reads its arguments and changes
nothing. The scene holds what is the same for all candidates of a request; `build_scene` computes it once.

This request's own time on the worker:

- `prefill_s`: the cost of the prefill leg that comes first, if the request is handed from a prefill worker to this one.
- `queue_s`: the wait until the prompts that are already queued on the worker are computed.
- `compute_s`: the prefill of the prompt tokens that the worker does not have in its cache.
- `fetch_s`: the transfer of cached KV from RAM, disk, a shared store or the prefill worker.
- `decode_s`: the decode of the expected output. A step takes longer the more tokens are resident on the worker.
- `kv_s`: KV memory pressure. A worker with nearly full KV memory must delay or preempt sequences.

What the choice costs other requests:

- `others_s`: the delay of other requests by this prompt. Each sequence that decodes on the worker is slowed down. Requests
  that return to their cached conversation there arrive at a rate r; a prompt of S seconds behind a queue of B seconds
  delays them by r * S * (B + S/2) in total. Long prompts therefore gather on workers to which few requests return.
- `later_s`: the expected wait of this conversation's next turns, from the worker's average queue. A conversation that
  continues expects `later_turns` more turns. A new one expects as many as conversations had recently.
- `recent_s`: a charge for a worker that recently got more than its share of the work, and a credit for one that got less.
  Computed tokens count where they evict other conversations' blocks. Requests count a little in an idle fleet, where all
  queues are empty at every decision.
- `move_s`: the loss of cached tokens. It weighs more than the time to compute them again, because work that is done twice
  delays all requests. Where several conversations continue from the last known block, that block ends a shared prefix
  such as a system prompt. Computing it on another worker is an investment, so the loss weighs less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.settings import CostSettings

_new = tuple.__new__  # creates a Reason without keyword handling; several times faster, and it runs for every candidate


@dataclass(slots=True)
class Scene:
    """What is the same for all candidates of a request."""

    settings: CostSettings
    most_cached: int  # prompt tokens in the cache of the candidate that has the most
    continues: bool  # the request is the next turn of a known conversation
    idle: bool  # queues are so short that they do not distinguish the workers
    weight: float  # sum of the candidates' weights
    mean_requests: float  # recent requests per unit of weight
    mean_tokens: float  # recently computed tokens per unit of weight
    returns_per_s: float  # weight of a second of delay, per recent request of a worker, for requests that return to it
    later_turns: float  # expected further turns of this conversation
    recent_tokens_s: float  # charge for a worker with twice its share of the recently computed tokens
    recent_request_s: float  # charge for each recent request above the worker's share
    move_factor: float  # weight of a second of computing lost tokens again


def build_scene(
    query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, settings: CostSettings
) -> Scene:
    """Summarize the candidates of a request."""
    most_cached, least_compute_s = 0, inf
    requests = returns = tokens = mean_queue_s = weight = 0.0
    for one in candidates:
        load, member = one.load, one.member
        rate, cached = member.tokens_per_s, one.cached_tokens
        requests += load.recent_requests
        returns += load.recent_returns
        tokens += load.recent_tokens
        mean_queue_s += load.mean_queued_tokens / rate
        weight += member.weight
        compute_s = one.compute_tokens / rate
        if cached > most_cached:
            most_cached = cached
        if compute_s < least_compute_s:
            least_compute_s = compute_s
    count = len(candidates)
    if prefix.totals is not None:
        count, weight, requests, returns, tokens, mean_queue_s = prefix.totals
    returning = returns / requests if requests else 0.0
    private = min(1.0, 3 * returning)  # whether it matters which worker has a block; not with a store that all share
    branches = prefix.branches
    continues = most_cached > 0 and branches < 2
    later_turns = settings.later_turns
    if not continues:
        if len(query.keys) * query.block_tokens - most_cached < query.block_tokens:
            later_turns = 0.0  # it leaves no block of its own, so no later request can return to it
        else:
            recent_turns = returns / max(requests - returns, 1e-9)
            later_turns = min(max(recent_turns, later_turns), settings.most_later_turns)
    idle = mean_queue_s < settings.idle_queue_s * count
    return Scene(
        settings,
        most_cached,
        continues,
        idle,
        weight,
        requests / weight,
        (tokens + 1) / weight,
        settings.returns_weight * returning * candidates[0].load.decay_per_s,
        private * later_turns,
        private * settings.recent_weight * prefix.evicting * least_compute_s,
        settings.request_s if idle else 0.0,
        settings.move_factor / (branches * branches) if branches > 1 else settings.move_factor,
    )


def costs(query: RouteQuery, candidates: Sequence[Candidate], scene: Scene) -> list[Reason]:
    """Return the cost of running the request on each candidate, with its terms. See the module docstring.

    It is one loop without calls, because it runs for all workers in each decision.
    """
    settings, num_tokens = scene.settings, query.num_tokens
    most_cached, returns_per_s, later_turns = scene.most_cached, scene.returns_per_s, scene.later_turns
    mean_tokens, mean_requests = scene.mean_tokens, scene.mean_requests
    recent_tokens_s, recent_request_s = scene.recent_tokens_s, scene.recent_request_s
    crowd_tokens, stall_share = settings.crowd_tokens, settings.stall_share
    reasons = []
    for candidate in candidates:
        load, member = candidate.load, candidate.member
        rate, weight, kv_used = member.tokens_per_s, member.weight, member.kv_used
        cached_tokens, pull_tokens = candidate.cached_tokens, candidate.pull_tokens
        fetch_s = decode_s = kv_s = move_s = 0.0

        prefill_s = candidate.prefill_s
        queue_s = candidate.queued_tokens / rate
        compute_s = candidate.compute_tokens / rate
        if pull_tokens or candidate.host_tokens or candidate.disk_tokens:
            fetch_s = (
                candidate.host_tokens / settings.host_tokens_per_s
                + candidate.disk_tokens / settings.disk_tokens_per_s
                + pull_tokens / settings.pull_tokens_per_s
            )
        if candidate.output_tokens:
            resident = load.context_tokens + load.output_tokens + num_tokens
            decode_s = candidate.output_tokens * member.step_s * (1 + resident / crowd_tokens)
        if kv_used:
            kv_s = settings.kv_pressure_s * kv_used / (1 - kv_used if kv_used < 0.98 else 0.02)

        recent_requests = load.recent_requests
        delayed = returns_per_s * recent_requests * (queue_s + compute_s / 2)
        others_s = compute_s * (stall_share * load.decoding + delayed)
        later_s = later_turns * load.mean_queued_tokens / rate
        token_excess = (load.recent_tokens + 1) / (mean_tokens * weight + 1) - 1
        request_excess = recent_requests - mean_requests * weight
        recent_s = recent_tokens_s * token_excess + recent_request_s * request_excess
        if cached_tokens != most_cached:
            move_s = scene.move_factor * (most_cached - cached_tokens) / rate

        own_s = prefill_s + queue_s + compute_s + fetch_s + decode_s + kv_s
        cost_s = own_s + others_s + later_s + recent_s + move_s
        reasons.append(
            _new(
                Reason,
                (
                    candidate.worker_id, cost_s, cached_tokens, "decode" if pull_tokens else "whole",
                    prefill_s, queue_s, compute_s, fetch_s, decode_s, kv_s,
                    others_s, later_s, recent_s, move_s, 0.0, 0,
                ),
            )
        )  # fmt: skip
    return reasons
