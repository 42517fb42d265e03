"""Candidate: one way to run a request, as the routing policies see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.load_book import WorkerLoad


@dataclass(slots=True, eq=False)
class Candidate:
    """A worker, and the work that the request would cause there.

    Whether that is a whole request, only its prefill or only its decode shows in the token counts alone, so a policy does
    not need to know about roles. A candidate is valid for one routing decision: the router reuses the object for the next.
    """

    member: Member
    worker_id: WorkerId
    load: WorkerLoad  # owned by the load book
    queued_tokens: float = 0.0  # prompt tokens queued before this request, from this gateway or another one
    cached_tokens: int = 0  # prompt tokens whose KV the worker has, in any tier
    host_tokens: int = 0  # how many of these must be fetched from its RAM
    disk_tokens: int = 0  # how many of these must be fetched from its disk or from a shared store
    compute_tokens: int = 0  # prompt tokens to compute on this worker
    pull_tokens: int = 0  # prompt tokens whose KV comes from a prefill worker
    output_tokens: int = 0  # expected output tokens; 0 on a prefill worker
    prefill_s: float = 0.0  # cost of the prefill worker's part, or of prefilling on a decode worker


class PoolTotals(NamedTuple):
    """Sums over all workers that could get the request."""

    workers: int = 0
    weight: float = 0.0
    recent_requests: float = 0.0
    recent_returns: float = 0.0
    recent_tokens: float = 0.0
    mean_queue_s: float = 0.0  # average queues


@dataclass(slots=True)
class PrefixInfo:
    """What is known about the request as a whole. It is the same for all candidates."""

    branches: int = 0  # how many different continuations follow the last block of this prompt that any worker has
    evicting: float = 1.0  # fraction of recently stored blocks that evicted another one, 0 to 1
    totals: PoolTotals | None = None  # of all workers, if only a part of them are candidates
