"""What the router is asked, and what it answers: RouteQuery in, Route with its legs and reasons out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stoker.base.errors import NotFound, Overloaded
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.load_book import Reservation
from stoker.fleet.prefix_index import Key, Match


class ModelNotFound(NotFound):
    """No worker, usable or not, serves this model."""

    code = "model_not_found"


class NoWorker(Overloaded):
    """The model is served, but by nobody who could take this request now."""

    code = "no_worker"


@dataclass(slots=True, kw_only=True)
class RouteQuery:
    """Not frozen, like the rest that is made for every request: that would take three times as long."""

    model: str
    keys: Sequence[Key]  # of the conversation's full blocks
    block_tokens: int
    num_tokens: int  # of the whole prompt
    max_output_tokens: int | None = None
    session: str | None = None
    parent_session: str | None = None
    excluded: frozenset[WorkerId] = frozenset()
    needs_dialect: frozenset[str] | None = None  # a resume: only workers that speak one of these
    matches: Mapping[WorkerId, Match] | None = None  # what the index says of `keys` now, if it was asked already


class Reason(NamedTuple):
    """Why a candidate was, or was not, chosen: its cost and what it is made of, in seconds. The least cost wins.
    Other policies than `cost` fill in what they have."""

    worker_id: WorkerId
    cost_s: float
    cached_tokens: int = 0
    part: str = "whole"  # prefill, decode: one leg of a hand-off
    prefill_s: float = 0.0  # the prefill leg before this one
    queue_s: float = 0.0  # prompts before this one
    compute_s: float = 0.0  # this prompt's uncached part
    fetch_s: float = 0.0  # what must come from a lower tier, or from the prefill worker
    decode_s: float = 0.0  # the answer, among the others that decode there
    kv_s: float = 0.0  # KV pressure
    others_s: float = 0.0  # what those who come back to this worker would wait for this prompt
    later_s: float = 0.0  # what this conversation's next turns would wait there
    recent_s: float = 0.0  # more than its part of the recent work
    move_s: float = 0.0  # computing again what another worker holds

    def as_dict(self) -> dict[str, object]:
        terms = {name: round(getattr(self, name), 6) for name in _TERMS if getattr(self, name)}
        return {"worker": self.worker_id, "part": self.part, "cached_tokens": self.cached_tokens, **terms}


_TERMS = (
    "cost_s",
    "prefill_s",
    "queue_s",
    "compute_s",
    "fetch_s",
    "decode_s",
    "kv_s",
    "others_s",
    "later_s",
    "recent_s",
    "move_s",
)


@dataclass(slots=True, eq=False)
class Leg:
    worker: Member
    reservation: Reservation
    cached_tokens: int  # what we think it will find


@dataclass(slots=True)
class Route:
    """Where a request goes; its reservations are made. `end` must be called on every path, and may be called again."""

    decode: Leg
    prefill: Leg | None  # None: the decode leg's worker computes the prompt too
    policy: str
    reasons: list[Reason]

    def first_token(self, now: float) -> None:
        """The prompt is computed."""
        if self.prefill is not None:
            self.prefill.reservation.end(now)
        self.decode.reservation.first_token(now)

    def end(self, now: float) -> None:
        if self.prefill is not None:
            self.prefill.reservation.end(now)
        self.decode.reservation.end(now)
