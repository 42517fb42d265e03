"""The contract of a routing policy: give every candidate a cost. The router takes the candidate with the lowest cost.

Scoring and remembering are separate steps. `score` is pure: it may read the policy's state, but it must not change it.
The router calls `commit` once for each routed request, after it has chosen. A request that is handed from a prefill
worker to a decode worker has two choices, one for each leg; they are committed together, as one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stoker.base.registry import Registry
from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.settings import RouterSettings


class LegChoice(NamedTuple):
    """One leg of a route: the candidates that were scored, their reasons, and the position of the chosen one."""

    candidates: Sequence[Candidate]
    reasons: list[Reason]
    chosen: int


class Policy(Protocol):
    """Scores the candidates of a request. Register a factory that takes RouterSettings in POLICIES."""

    # True if costs are in seconds, so that a hand-off can be compared with prefilling on the decode worker.
    in_seconds: bool

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, now: float) -> list[Reason]:
        """Return a Reason for each candidate, in their order, without changing any state. There is always a candidate."""

    def commit(self, query: RouteQuery, choices: Sequence[LegChoice], now: float) -> None:
        """Remember what was chosen for a routed request: one choice, or two when prefill and decode are separate."""


class PolicyMaker(Protocol):
    """Creates a policy. A policy class with a constructor of this signature is one."""

    def __call__(self, settings: RouterSettings) -> Policy: ...


POLICIES: Registry[PolicyMaker] = Registry("routing policy", "stoker.routing.policies")
