"""The work that other gateways have sent to the workers, from what the workers publish. It is reserved in the load book.

So each gateway's load view is that of all gateways, without any connection between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stoker.base.ids import WorkerId
from stoker.fleet.load_book import LoadBook, Reservation
from stoker.fleet.other_load import NO_OTHERS, OtherLoad
from stoker.proto.work import WorkChange

_MAX_OPEN = 8192  # requests of one worker; a worker that reports more is not believed
_MAX_TOKENS = 1 << 24


@dataclass(slots=True)
class _WorkerRequests:
    """The requests of other gateways on one worker, by the worker's number of them."""

    reserved: dict[int, Reservation] = field(default_factory=dict)
    flex: set[int] = field(default_factory=set)
    busy_s: float = -math.inf

    def remove(self, number: int, now: float) -> None:
        reservation = self.reserved.pop(number, None)
        if reservation is None:
            return
        reservation.end(now)
        if number in self.flex:
            self.flex.discard(number)
        else:
            self.busy_s = now


class OtherWork:
    """Reservations for the requests of other gateways. `own` is this gateway's name: its requests are reserved already.

    `on_interactive` is called when another gateway has sent an interactive request to a worker.
    """

    def __init__(self, load_book: LoadBook, own: str) -> None:
        self._load_book = load_book
        self.own = own
        self.on_interactive: Callable[[], object] = lambda: None
        self._open: dict[WorkerId, _WorkerRequests] = {}

    @property
    def num_open(self) -> int:
        return sum(len(worker.reserved) for worker in self._open.values())

    def load(self, worker_id: WorkerId) -> OtherLoad:
        """Return the requests of other gateways on a worker."""
        worker = self._open.get(worker_id)
        if worker is None:
            return NO_OTHERS
        return OtherLoad(len(worker.reserved) - len(worker.flex), len(worker.flex), worker.busy_s)

    def saw(
        self, worker_id: WorkerId, changes: Iterable[WorkChange], everything: Iterable[WorkChange] | None, now: float
    ) -> None:
        """Apply changes, and end what is missing in the worker's list of everything open, if there is one."""
        worker = self._open.setdefault(worker_id, _WorkerRequests())
        for change in changes:
            self._apply(worker_id, worker, change, now)
        if everything is not None:
            numbers = set()
            for change in everything:
                numbers.add(change.number)
                self._apply(worker_id, worker, change, now)
            for number in [number for number in worker.reserved if number not in numbers]:
                worker.remove(number, now)

    def forget(self, worker_id: WorkerId, now: float) -> None:
        """End everything on a worker that has left or restarted."""
        worker = self._open.pop(worker_id, None)
        if worker is not None:
            for reservation in worker.reserved.values():
                reservation.end(now)

    def _apply(self, worker_id: WorkerId, worker: _WorkerRequests, change: WorkChange, now: float) -> None:
        if change.gateway == self.own:
            return
        if change.stage == "end":
            worker.remove(change.number, now)
            return
        reservation = worker.reserved.get(change.number)
        if reservation is None:
            if len(worker.reserved) >= _MAX_OPEN:
                return
            prefill, context, output = (
                min(max(count, 0), _MAX_TOKENS)
                for count in (change.prefill_tokens, change.context_tokens, change.output_tokens)
            )
            reservation = worker.reserved[change.number] = self._load_book.reserve(
                worker_id, prefill_tokens=prefill, context_tokens=context, output_tokens=output, now=now
            )
            if change.is_flex:
                worker.flex.add(change.number)
            else:
                self.on_interactive()
        if change.stage == "first":
            reservation.first_token(now)
