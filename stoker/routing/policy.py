"""The contract of a routing policy: give every candidate a cost; the router takes the least.

A candidate is a way to run the request: a worker, and what it would have to do there: so many tokens to compute, so many
to fetch, so many to keep. Whether that is a whole request, its prefill or its decode shows in these numbers alone, so
that a policy knows no roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stoker.base.ids import WorkerId
from stoker.base.registry import Registry
from stoker.fleet.fleet import Member
from stoker.fleet.ledger import Load
from stoker.routing.query import Reason, RouteQuery


@dataclass(slots=True, eq=False)
class Candidate:
    member: Member
    worker_id: WorkerId
    load: Load  # the ledger's: valid during this choice
    tokens_per_s: float  # of prefill, slow start counted in
    step_s: float
    cached_tokens: int  # what it would find, in all tiers
    host_tokens: int  # of these, those to be fetched from its RAM
    disk_tokens: int  # and from its disk, or a store that all share
    compute_tokens: int
    pull_tokens: int  # from a prefill worker
    context_tokens: int
    output_tokens: int  # expected
    branches: int = 0  # how many ways conversations went on from the last block that anybody has of this one
    prefill_s: float = 0.0  # what the prefill worker's part costs before this one begins


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Of the cost policy: what cannot be measured from outside and must be believed."""

    host_tokens_per_s: float = 400_000.0  # KV coming from the worker's RAM
    disk_tokens_per_s: float = 60_000.0  # from its disk, or from a store that all share
    pull_tokens_per_s: float = 200_000.0  # from a prefill worker
    kv_pressure_s: float = 0.15  # times k / (1 - k), k the share of the KV memory in use
    crowd_tokens: float = 262_144.0  # resident tokens that double a decode step
    stall_share: float = 0.1  # of a prompt's time, what each sequence that decodes there is held up
    move_factor: float = 40.0
    returns_weight: float = 1.5
    later_weight: float = 0.6
    recent_weight: float = 3.0
    tau_s: float = 173.0
    request_s: float = 0.01
    bound: float = 0.03
    bound_requests: float = 3.0
    balance_share: float = 0.004
    balance_part: float = 0.65
    bound_s: float = 30.0
    home_bound: float = 0.05


@dataclass(frozen=True, slots=True)
class RouterSettings:
    policy: str = "cost"
    expected_output_tokens: int = 256  # what a request is charged with, if the client allows so much
    local_prefill_tokens: int = 256  # an uncached rest up to this is never worth a hand-off
    local_prefill_share: float = 0.25  # of a longer one's time, what computing it on a decode worker costs those who decode
    cluster_spill_s: float = 5.0  # a home cluster may have so much longer a queue than the best one
    num_explained: int = 256
    seed: int = 0
    cost: CostSettings = field(default_factory=CostSettings)


class Policy(Protocol):
    in_seconds: bool  # whether costs are times, so that a hand-off can be weighed against doing without

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], now: float) -> list[Reason]:
        """A Reason for each candidate, in their order. `candidates` is never empty."""


class PolicyMaker(Protocol):
    def __call__(self, settings: RouterSettings) -> Policy: ...


POLICIES: Registry[PolicyMaker] = Registry("routing policy", "stoker.routing.policies")
