"""LoadBook: the work that the router has assigned to each worker and that is not finished yet.

Choosing a worker reserves the request's work there. The reservation counts the prompt tokens to compute until the first
token, and the context and output tokens that stay resident until the end. It is released on every path.

The exact token counts do not say how far a worker has come with its prompts. The book therefore also estimates the
tokens that are still queued: work is processed in order of arrival at the worker's prefill rate. The estimate never falls
below the tokens behind the oldest unfinished prompt, and every first token corrects it.

The book also keeps decaying counts of the recent requests and computed tokens. When sessions arrive slowly, every worker
is idle at every decision, and the load alone would send them all to the same worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member

_SAME_TIME_S = 0.001  # loads are updated at most once in this time


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """One worker's load, as of the last `LoadBook.load`. The book owns it and updates it: read it, do not keep it."""

    prefill_tokens: int = 0  # reserved prompt tokens of requests without a first token
    queued_tokens: float = 0.0  # estimate of how many of these are still to be computed
    context_tokens: int = 0  # prompt tokens that are or will be resident in KV memory
    output_tokens: int = 0  # expected output tokens of the running requests
    requests: int = 0  # running or queued
    decoding: int = 0  # how many of these are past their first token
    recent_requests: float = 0.0  # assigned recently; decays with the half-life
    recent_tokens: float = 0.0  # prompt tokens to compute, assigned recently
    recent_returns: float = 0.0  # recent requests that came for blocks which other workers do not have
    mean_queued_tokens: float = 0.0  # average queue over the same time
    decay_per_s: float = 0.0  # a steady rate of r requests per second gives recent_requests = r / decay_per_s
    _as_of: float = 0.0
    _tokens_per_s: float = 0.0
    _prefilling: dict[Reservation, None] = field(default_factory=dict)  # in order of arrival
    _leaving: bool = False

    @property
    def draining_tokens(self) -> float:
        """The number of queued tokens that are computed before the oldest unfinished prompt has its first token."""
        oldest = next(iter(self._prefilling), None)
        return self.queued_tokens - (self.prefill_tokens - oldest.prefill_tokens if oldest is not None else 0)


@dataclass(slots=True, eq=False)
class Reservation:
    """Work reserved on one worker. `first_token` and `end` may be called in any order and any number of times."""

    worker_id: WorkerId
    prefill_tokens: int
    context_tokens: int
    output_tokens: int
    _load: WorkerLoad
    _book: LoadBook
    _open: bool = True
    queued_tokens: float = 0.0  # prompt tokens that waited at the worker when the reservation was made

    def first_token(self, now: float) -> None:
        if self in self._load._prefilling:
            self._book._release_prefill(self, now)

    def end(self, now: float) -> None:
        if self in self._load._prefilling:
            self._book._release_prefill(self, now)
        if self._open:
            self._open = False
            self._book._release_rest(self)


@dataclass(frozen=True, slots=True)
class LoadTotals:
    """Sums over all workers. They are zero when no request is running; any other value then is a leak."""

    prefill_tokens: int
    context_tokens: int
    output_tokens: int
    requests: int


class LoadBook:
    """The load of every worker, and its recent history. See the module docstring."""

    def __init__(self, recent_half_life_s: float = 120.0) -> None:
        self._decay_per_s = log(2) / recent_half_life_s
        self._loads: dict[WorkerId, WorkerLoad] = {}
        # Prompt tokens and requests that were reserved, since the start.
        self.arrived_tokens = self.arrived_requests = 0
        self._faded_s, self._fade = 0.0, 1.0  # the last elapsed time, and what it leaves of the averages
        self._changed: set[WorkerId] = set()  # at most one entry for each worker

    def take_changed(self) -> set[WorkerId]:
        """Return the workers whose reservations have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

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
        """Reserve a request's work. `returning`: it came to this worker for cached blocks that others do not have."""
        load = self.load(worker_id, now)
        self._changed.add(worker_id)
        reservation = self._new_reservation(worker_id, prefill_tokens, context_tokens, output_tokens, load)
        reservation.queued_tokens = load.queued_tokens
        load._prefilling[reservation] = None
        load.prefill_tokens += prefill_tokens
        load.queued_tokens += prefill_tokens
        load.context_tokens += context_tokens
        load.output_tokens += output_tokens
        load.requests += 1
        load.recent_requests += 1
        load.recent_tokens += prefill_tokens
        load.recent_returns += returning
        self.arrived_tokens += prefill_tokens
        self.arrived_requests += 1
        return reservation

    def _new_reservation(
        self, worker_id: WorkerId, prefill: int, context: int, output: int, load: WorkerLoad
    ) -> Reservation:
        return Reservation(worker_id, prefill, context, output, load, self)

    def changes_by_reading(self, worker_id: WorkerId, now: float, tokens_per_s: float) -> bool:
        """Return True if `load` with these arguments would advance the estimate of the worker's queue."""
        load = self._loads.get(worker_id)
        if load is None or now - load._as_of > _SAME_TIME_S:
            return True
        return bool(tokens_per_s) and tokens_per_s != load._tokens_per_s

    def load(self, worker_id: WorkerId, now: float, tokens_per_s: float = 0.0) -> WorkerLoad:
        """Return the worker's load at `now`. `tokens_per_s` is its prefill rate; 0 keeps the rate of the last call."""
        load = self._loads.get(worker_id)
        if load is None:
            load = self._add_worker(worker_id, now)
        if now - load._as_of > _SAME_TIME_S:
            self._advance(load, now)
        if tokens_per_s:
            load._tokens_per_s = tokens_per_s
        return load

    def loads(self, members: Iterable[Member], now: float) -> list[WorkerLoad]:
        """Return the load of each member, as `load` does. It is one loop, because a decision reads the loads of all workers."""
        known, found = self._loads, []
        for member in members:
            worker_id, tokens_per_s = member.spec.worker_id, member.tokens_per_s
            load = known.get(worker_id)
            if load is None:
                load = self._add_worker(worker_id, now)
            elapsed = now - load._as_of
            if elapsed > _SAME_TIME_S:
                if load.queued_tokens or elapsed != self._faded_s:
                    self._advance(load, now)
                else:  # written out for workers without a queue
                    fade = self._fade
                    load._as_of = now
                    load.recent_requests *= fade
                    load.recent_tokens *= fade
                    load.recent_returns *= fade
                    load.mean_queued_tokens *= fade
            if tokens_per_s:
                load._tokens_per_s = tokens_per_s
            found.append(load)
        return found

    def totals(self) -> LoadTotals:
        loads = self._loads.values()
        return LoadTotals(
            sum(load.prefill_tokens for load in loads),
            sum(load.context_tokens for load in loads),
            sum(load.output_tokens for load in loads),
            sum(load.requests for load in loads),
        )

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a worker that has left the fleet, once its last reservation is released."""
        load = self._loads.get(worker_id)
        if load is not None:
            load._leaving = True
            self._drop_if_idle(worker_id, load)

    def _add_worker(self, worker_id: WorkerId, now: float) -> WorkerLoad:
        """Start a new worker with the others' mean of recent work. Otherwise it would get every new session at first."""
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
        if elapsed != self._faded_s:  # in one decision, most workers were last read at the same time
            self._faded_s, self._fade = elapsed, exp(-elapsed * self._decay_per_s)
        fade = self._fade
        load.recent_requests *= fade
        load.recent_tokens *= fade
        load.recent_returns *= fade
        if load.queued_tokens:
            oldest = next(iter(load._prefilling))
            behind, before = load.prefill_tokens - oldest.prefill_tokens, load.queued_tokens
            after = load.queued_tokens = max(float(behind), before - elapsed * load._tokens_per_s)
            drain_s = min(elapsed, (before - after) / load._tokens_per_s) if before > after else 0.0
            # The integral of the queued tokens over the elapsed time.
            area = drain_s * (before + after) / 2 + (elapsed - drain_s) * after
            load.mean_queued_tokens = load.mean_queued_tokens * fade + area / elapsed * (1 - fade)
        else:
            load.mean_queued_tokens *= fade

    def _release_prefill(self, reservation: Reservation, now: float) -> None:
        load = reservation._load
        if now - load._as_of > _SAME_TIME_S:
            self._advance(load, now)
        self._changed.add(reservation.worker_id)
        del load._prefilling[reservation]
        load.decoding += 1
        load.prefill_tokens -= reservation.prefill_tokens
        load.queued_tokens = min(load.queued_tokens, float(load.prefill_tokens))

    def _release_rest(self, reservation: Reservation) -> None:
        load = reservation._load
        self._changed.add(reservation.worker_id)
        load.context_tokens -= reservation.context_tokens
        load.output_tokens -= reservation.output_tokens
        load.requests -= 1
        load.decoding -= 1
        if load._leaving:
            self._drop_if_idle(reservation.worker_id, load)

    def _drop_if_idle(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        if not load.requests and self._loads.get(worker_id) is load:
            del self._loads[worker_id]
            self._changed.discard(worker_id)
