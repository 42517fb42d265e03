"""The router's input and output: RouteQuery in, Route with its legs and reasons out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stoker.base.errors import NotFound, Overloaded
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.load_book import Reservation
from stoker.fleet.prefix_index import Key
from stoker.fleet.prefix_matches import PrefixMatches


class ModelNotFound(NotFound):
    """No worker serves this model, whether usable or not."""

    code = "model_not_found"


class NoWorker(Overloaded):
    """The model is served, but none of its workers can take this request now."""

    code = "no_worker"


@dataclass(slots=True, kw_only=True)
class RouteQuery:
    """What the router must know about a request.

    The class is not frozen because creating a frozen dataclass takes three times as long, and each request creates one.
    """

    model: str
    keys: Sequence[Key]  # prefix keys of the prompt's full blocks
    block_tokens: int
    num_tokens: int  # of the whole prompt
    max_output_tokens: int | None = None
    session: str | None = None
    parent_session: str | None = None
    excluded: frozenset[WorkerId] = frozenset()  # workers that failed this request already
    needs_dialect: frozenset[str] | None = None  # for a resume: only workers of these dialects can continue
    # A worker that drains holds the KV of all tokens for it, so that no prefill worker is needed.
    brings_kv: bool = False
    matches: PrefixMatches | None = None  # the index's answer for `keys`, if the caller has looked it up


class Reason(NamedTuple):
    """The cost of one candidate and its terms, in seconds. The candidate with the lowest cost is chosen.

    `routing/cost.py` explains the terms. Policies other than `cost` fill in only `cost_s`, in units of their own.
    """

    worker_id: WorkerId
    cost_s: float
    cached_tokens: int = 0
    part: str = "whole"  # or "prefill" or "decode", for one leg of a hand-off
    prefill_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    fetch_s: float = 0.0
    decode_s: float = 0.0
    kv_s: float = 0.0
    others_s: float = 0.0
    later_s: float = 0.0
    recent_s: float = 0.0
    move_s: float = 0.0
    placement_s: float = 0.0  # negative: a placement rule prefers this candidate
    spent_tokens: int = 0  # prompt tokens computed again for balance, if this candidate is chosen

    def as_dict(self) -> dict[str, object]:
        """Return the terms that are not zero, for `/admin/routes`."""
        terms = {name: round(getattr(self, name), 6) for name in _TERMS if getattr(self, name)}
        return {"worker": self.worker_id, "part": self.part, "cached_tokens": self.cached_tokens, **terms}


_TERMS = tuple(name for name in Reason._fields if name.endswith("_s"))


@dataclass(slots=True, eq=False)
class Leg:
    """One worker of a route, and the work reserved there."""

    worker: Member
    reservation: Reservation
    cached_tokens: int  # prompt tokens that the worker is expected to find in its cache
    confirmed_blocks: int = 0  # how many blocks of the prompt the worker has on its device for sure


@dataclass(slots=True)
class Route:
    """The chosen workers, with the work reserved. `end` must be called on every path, and may be called repeatedly."""

    decode: Leg
    prefill: Leg | None  # None: the decode leg's worker computes the prompt too
    policy: str
    reasons: list[Reason]
    matches: PrefixMatches  # what the workers held when the route was chosen
    routed_s: float

    def first_token(self, now: float) -> None:
        """Release the reservation of the prefill: the prompt is computed."""
        if self.prefill is not None:
            self.prefill.reservation.end(now)
        self.decode.reservation.first_token(now)

    def end(self, now: float) -> None:
        """Release all reservations."""
        if self.prefill is not None:
            self.prefill.reservation.end(now)
        self.decode.reservation.end(now)
