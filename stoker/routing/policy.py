"""The contract of a routing policy: give every candidate a cost; the router takes the least.

A candidate is a way to run the request: a worker, and what it would have to do there: so many tokens to compute, so many
to fetch, so many to keep. Whether that is a whole request, its prefill or its decode shows in these numbers alone, so
that a policy knows no roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from stoker.base.errors import ConfigError
from stoker.base.ids import WorkerId
from stoker.base.registry import Registry
from stoker.base.tables import check_positive
from stoker.fleet.fleet import Member
from stoker.fleet.ledger import Load
from stoker.routing.query import Reason, RouteQuery


@dataclass(slots=True, eq=False)
class Candidate:
    """Valid during one `score`: the router uses it again for the next choice."""

    member: Member
    worker_id: WorkerId
    load: Load  # the ledger's
    queued_tokens: float = 0.0  # of prompts before this one, ours or another gateway's
    cached_tokens: int = 0  # what it would find, in all tiers
    host_tokens: int = 0  # of these, those to be fetched from its RAM
    disk_tokens: int = 0  # and from its disk, or a store that all share
    compute_tokens: int = 0
    pull_tokens: int = 0  # from a prefill worker
    context_tokens: int = 0
    output_tokens: int = 0  # expected
    branches: int = 0  # how many ways conversations went on from the last block that anybody has of this one
    evicting: float = 1.0  # 0..1, of the blocks that workers took lately, how many pushed another one out
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
    move_factor: float = 40.0  # what a lost hit weighs, against the same time waited
    returns_weight: float = 1.5  # what others wait, against what this request waits
    later_turns: float = 0.6  # of a conversation that goes on, to be expected; of a new one, at least
    most_later_turns: float = 20.0  # and at most: by then, queues are others than now
    recent_weight: float = 3.0  # of a prompt's time, for a worker with twice its part of the recent tokens
    request_s: float = 0.001  # for every recent request more than its part
    idle_queue_s: float = 0.1  # a fleet with shorter queues on average is idle
    bound: float = 0.05  # a worker may have so many more of the recent requests than its part
    bound_requests: float = 8.0  # and at least this many
    over_bound_s: float = 30.0
    balance_share: float = 0.004  # of all prompt tokens, what may be computed again for balance
    balance_part: float = 0.65  # of a prompt, what a conversation may lose when it is given away
    home_slack_s: float = 0.02  # workers so near to the best are as good, and a session's hash decides
    even_s: float = 1.0  # in an idle fleet: what a session may wait for each session that another worker has more
    move_share: float = 4.5  # of the tokens spared for balance, what a session's move may take for an excess of 100 %
    move_part: float = 0.75  # of its prompt, what a session may lose by that
    balance_s: float = 0.5  # what anyone may wait for balance: the time in which the lost tokens are computed again

    def __post_init__(self) -> None:
        rates = ("host_tokens_per_s", "disk_tokens_per_s", "pull_tokens_per_s", "crowd_tokens")
        check_positive("routing.cost", self, *rates)
        for name, value in asdict(self).items():
            if not value >= 0:
                raise ConfigError(f"routing.cost.{name}={value:g}: it must not be below zero")


@dataclass(frozen=True, slots=True)
class RouterSettings:
    policy: str = "cost"
    expected_output_tokens: int = 256  # what a request is charged with, if the client allows so much
    local_prefill_tokens: int = 256  # an uncached rest up to this is never worth a hand-off
    local_prefill_share: float = (
        0.25  # of a longer one's time, what computing it on a decode worker costs those who decode
    )
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
