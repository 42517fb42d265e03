"""The work that other gateways have sent to the workers, from what the workers publish. It is reserved in the load book.

So each gateway's load view is that of all gateways, without any connection between them.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.base.ids import WorkerId
from stoker.fleet.load_book import LoadBook, Reservation
from stoker.proto.work import WorkChange

_MAX_OPEN = 8192  # requests of one worker; a worker that reports more is not believed
_MAX_TOKENS = 1 << 24


class OtherWork:
    """Reservations for the requests of other gateways. `own` is this gateway's name: its requests are reserved already."""

    def __init__(self, load_book: LoadBook, own: str) -> None:
        self._load_book = load_book
        self.own = own
        self._open: dict[WorkerId, dict[int, Reservation]] = {}

    @property
    def num_open(self) -> int:
        return sum(len(reserved) for reserved in self._open.values())

    def saw(
        self, worker_id: WorkerId, changes: Iterable[WorkChange], everything: Iterable[WorkChange] | None, now: float
    ) -> None:
        """Apply changes, and end what is missing in the worker's list of everything open, if there is one."""
        reserved = self._open.setdefault(worker_id, {})
        for change in changes:
            self._apply(worker_id, reserved, change, now)
        if everything is not None:
            numbers = set()
            for change in everything:
                numbers.add(change.number)
                self._apply(worker_id, reserved, change, now)
            for number in [number for number in reserved if number not in numbers]:
                reserved.pop(number).end(now)

    def forget(self, worker_id: WorkerId, now: float) -> None:
        """End everything on a worker that has left or restarted."""
        for reservation in self._open.pop(worker_id, {}).values():
            reservation.end(now)

    def _apply(self, worker_id: WorkerId, reserved: dict[int, Reservation], change: WorkChange, now: float) -> None:
        if change.gateway == self.own:
            return
        reservation = reserved.get(change.number)
        if change.stage == "end":
            if reservation is not None:
                del reserved[change.number]
                reservation.end(now)
            return
        if reservation is None:
            if len(reserved) >= _MAX_OPEN:
                return
            prefill, context, output = (
                min(max(count, 0), _MAX_TOKENS)
                for count in (change.prefill_tokens, change.context_tokens, change.output_tokens)
            )
            reservation = reserved[change.number] = self._load_book.reserve(
                worker_id, prefill_tokens=prefill, context_tokens=context, output_tokens=output, now=now
            )
        if change.stage == "first":
            reservation.first_token(now)
