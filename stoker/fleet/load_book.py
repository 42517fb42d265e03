"""What each worker was given and has not finished: reservations, made when a worker is chosen and returned on every path.

A request is charged with the prompt tokens to compute (until its first token), and with the context and output tokens it
will keep resident (until its end). Besides the exact sums there is an estimate of how far the worker has come with the
prompts, so that a request behind a 100k-token prompt half done is not told to wait for all of it: work drains at the
worker's rate, first come first served, never below what stands behind the oldest prompt, and is set right by every
first token.

The load_book also remembers, decaying, what was given lately: how many requests, and how many tokens to compute. WorkerLoad alone
is zero at every pick when sessions are paced, and would send them all to one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

from stoker.base.ids import WorkerId

_SAME_TIME_S = 0.001  # accounts are brought up to date no more often than that


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """One worker's account, as of the last `LoadBook.load`. The load_book's own object: read it, do not keep it."""

    prefill_tokens: int = 0  # charged and without a first token
    queued_tokens: float = 0.0  # of these, those still to compute, by estimate
    context_tokens: int = 0  # resident, or soon so
    output_tokens: int = 0  # promised
    requests: int = 0
    decoding: int = 0  # of these, those past their first token
    recent_requests: float = 0.0  # given lately, decaying
    recent_tokens: float = 0.0
    recent_returns: float = 0.0  # of the requests, those that came for what only this worker has
    mean_queued_tokens: float = 0.0  # over the same time
    decay_per_s: float = 0.0  # of what is recent: a steady r requests a second shows as r / this
    _as_of: float = 0.0
    _tokens_per_s: float = 0.0
    _prefilling: dict[Reservation, None] = field(default_factory=dict)  # in the order of arrival
    _leaving: bool = False


@dataclass(slots=True, eq=False)
class Reservation:
    """A reservation on one worker. `first_token` and `end` may come in any order and any number of times."""

    worker_id: WorkerId
    prefill_tokens: int
    context_tokens: int
    output_tokens: int
    _load: WorkerLoad
    _load_book: LoadBook
    _open: bool = True

    def first_token(self, now: float) -> None:
        if self in self._load._prefilling:
            self._load_book._return_prefill(self, now)

    def end(self, now: float) -> None:
        if self in self._load._prefilling:
            self._load_book._return_prefill(self, now)
        if self._open:
            self._open = False
            self._load_book._return_rest(self)


@dataclass(frozen=True, slots=True)
class LoadTotals:
    """Over all workers. All zero when nothing is under way; anything else then is a leak."""

    prefill_tokens: int
    context_tokens: int
    output_tokens: int
    requests: int


class LoadBook:
    def __init__(self, recent_half_life_s: float = 120.0) -> None:
        self._decay_per_s = log(2) / recent_half_life_s
        self._loads: dict[WorkerId, WorkerLoad] = {}

    def reserve(
        self,
        worker_id: WorkerId,
        *,
        prefill_tokens: int,
        context_tokens: int,
        output_tokens: int,
        now: float,
        returning: bool = False,
    ) -> Reservation:
        """`returning`: it comes to this worker for what it has cached, and would cost more elsewhere."""
        load = self.load(worker_id, now)
        reservation = Reservation(worker_id, prefill_tokens, context_tokens, output_tokens, load, self)
        load._prefilling[reservation] = None
        load.prefill_tokens += prefill_tokens
        load.queued_tokens += prefill_tokens
        load.context_tokens += context_tokens
        load.output_tokens += output_tokens
        load.requests += 1
        load.recent_requests += 1
        load.recent_tokens += prefill_tokens
        load.recent_returns += returning
        return reservation

    def load(self, worker_id: WorkerId, now: float, tokens_per_s: float = 0.0) -> WorkerLoad:
        """The worker's account, brought up to `now`; it computes prompts at `tokens_per_s` (0: as said before)."""
        load = self._loads.get(worker_id)
        if load is None:
            load = self._open_account(worker_id, now)
        if now - load._as_of > _SAME_TIME_S:
            self._advance(load, now)
        if tokens_per_s:
            load._tokens_per_s = tokens_per_s
        return load

    def totals(self) -> LoadTotals:
        loads = self._loads.values()
        return LoadTotals(
            sum(load.prefill_tokens for load in loads),
            sum(load.context_tokens for load in loads),
            sum(load.output_tokens for load in loads),
            sum(load.requests for load in loads),
        )

    def forget(self, worker_id: WorkerId) -> None:
        """The worker has left. What it still holds stays counted until it is returned."""
        load = self._loads.get(worker_id)
        if load is not None:
            load._leaving = True
            self._drop_if_done(worker_id, load)

    def _open_account(self, worker_id: WorkerId, now: float) -> WorkerLoad:
        """A newcomer starts level with the others, or it would be given every new session until it had caught up."""
        others = list(self._loads.values())
        load = WorkerLoad(decay_per_s=self._decay_per_s, _as_of=now)
        if others:
            load.recent_requests = sum(other.recent_requests for other in others) / len(others)
            load.recent_tokens = sum(other.recent_tokens for other in others) / len(others)
            load.recent_returns = sum(other.recent_returns for other in others) / len(others)
        self._loads[worker_id] = load
        return load

    def _advance(self, load: WorkerLoad, now: float) -> None:
        elapsed = now - load._as_of
        if elapsed <= 0:
            return
        load._as_of = now
        fade = exp(-elapsed * self._decay_per_s)
        load.recent_requests *= fade
        load.recent_tokens *= fade
        load.recent_returns *= fade
        area = 0.0  # of queued tokens over time, since the last look
        if load.queued_tokens:
            oldest = next(iter(load._prefilling))
            behind, before = load.prefill_tokens - oldest.prefill_tokens, load.queued_tokens
            after = load.queued_tokens = max(float(behind), before - elapsed * load._tokens_per_s)
            drain_s = min(elapsed, (before - after) / load._tokens_per_s) if before > after else 0.0
            area = drain_s * (before + after) / 2 + (elapsed - drain_s) * after
        load.mean_queued_tokens = load.mean_queued_tokens * fade + area / elapsed * (1 - fade)

    def _return_prefill(self, reservation: Reservation, now: float) -> None:
        load = reservation._load
        if now - load._as_of > _SAME_TIME_S:
            self._advance(load, now)
        del load._prefilling[reservation]
        load.decoding += 1
        load.prefill_tokens -= reservation.prefill_tokens
        load.queued_tokens = min(load.queued_tokens, float(load.prefill_tokens))

    def _return_rest(self, reservation: Reservation) -> None:
        load = reservation._load
        load.context_tokens -= reservation.context_tokens
        load.output_tokens -= reservation.output_tokens
        load.requests -= 1
        load.decoding -= 1
        if load._leaving:
            self._drop_if_done(reservation.worker_id, load)

    def _drop_if_done(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        if not load.requests and self._loads.get(worker_id) is load:
            del self._loads[worker_id]
