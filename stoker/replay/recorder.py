"""Recorder: writes down every call that changes the state of the gateway's routing classes, and every decision.

The recorded classes are the real ones with a note before each call. Only calls from outside are noted, since the others
follow from them. So the same calls on fresh objects lead to the same decisions (`replayer.py`). Prompts are never recorded:
a conversation is the list of its prefix keys, which are hashes, and a session's name is hashed before it reaches the router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from hashlib import blake2b
from typing import Any, Protocol

from stoker.base.errors import StokerError
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import CandidatePool, Fleet, FleetSettings, Member
from stoker.fleet.load_book import LoadBook, Reservation, WorkerLoad
from stoker.fleet.lost_blocks import BlockLosses
from stoker.fleet.prefix_index import Key, PrefixIndex
from stoker.fleet.prefix_matches import PrefixMatches
from stoker.fleet.spec import LoadReport, Role, WorkerSpec
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

KEPT_MATCHES = 10_000  # lookups whose requests may still be routed
_MAX_KEYS = 1_000_000  # remembered keys; at this number the table is cleared
QUERY_FIELDS = tuple(one.name for one in fields(RouteQuery) if one.name not in ("keys", "matches"))


class EventSink(Protocol):
    def write(self, event: list[Any]) -> None:
        """Append an event."""


class Recorder:
    """Writes events, unless the call comes from within a recorded one."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._inside = False
        self._key_ids: dict[Key, int] = {}
        self._matches: OrderedDict[int, tuple[int, PrefixMatches]] = OrderedDict()  # by id of the object
        self._num_matches = 0
        self._routes: dict[int, int] = {}  # id of a route object -> its number, until the request has ended
        self._num_routes = 0

    @property
    def is_outside(self) -> bool:
        return not self._inside

    @contextmanager
    def call(self, *event: Any) -> Iterator[None]:
        """Note a call, and suppress the notes of the calls that it makes."""
        if self._inside:
            yield
            return
        self._sink.write(list(event))
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def note(self, *event: Any) -> None:
        if not self._inside:
            self._sink.write(list(event))

    def conversation(self, keys: Sequence[Key]) -> int:
        """Return the number of a conversation's last key, after writing its new keys. A key names all keys before it."""
        ids = self._key_ids
        if len(ids) > _MAX_KEYS:
            ids.clear()
            self._sink.write(["keys_reset"])
        known = len(keys)
        while known and keys[known - 1] not in ids:
            known -= 1
        parent = ids[keys[known - 1]] if known else -1
        if known < len(keys):
            self._sink.write(["keys", parent, list(keys[known:])])
            for key in keys[known:]:
                parent = ids[key] = len(ids)
        return parent

    def matched(self, model: str, keys: Sequence[Key], matches: PrefixMatches) -> None:
        """Note a lookup in an index whose result may become part of a query."""
        if self._inside:
            return
        self._sink.write(["match", model, self.conversation(keys)])
        self._matches[id(matches)] = self._num_matches, matches
        self._num_matches += 1
        if len(self._matches) > KEPT_MATCHES:
            self._matches.popitem(last=False)

    def match_number(self, matches: PrefixMatches | None) -> int | None:
        """Return the number of a lookup. None: the router looks the conversation up itself."""
        return None if matches is None else self._matches[id(matches)][0]

    def routed(self, route: Route) -> None:
        self._routes[id(route)] = self._num_routes
        self._num_routes += 1
        if len(self._routes) > 100_000:  # requests that ended without an answer
            self._routes.clear()

    def failed_route(self) -> None:
        self._num_routes += 1

    def answered(self, route: Route | None, now: float, prompt: int, cached: int, output: int, ttft_s: float) -> None:
        """Note the token counts of an answer. `route` is that of its first byte."""
        number = self._routes.pop(id(route), None) if route is not None else None
        if number is not None:
            self._sink.write(["answer", now, number, prompt, cached, output, ttft_s])


class NoRecorder:
    """Records nothing."""

    def answered(self, route: Route | None, now: float, prompt: int, cached: int, output: int, ttft_s: float) -> None:
        """Do nothing."""


class RecordedFleet(Fleet):
    """A fleet whose changes are noted."""

    def __init__(self, recorder: Recorder, settings: FleetSettings | None = None) -> None:
        super().__init__(settings)
        self._recorder = recorder

    def add(self, spec: WorkerSpec, now: float) -> Member:
        with self._recorder.call("add", now, asdict(spec)):
            return super().add(spec, now)

    def remove(self, worker_id: WorkerId, now: float) -> None:
        with self._recorder.call("remove", now, worker_id):
            super().remove(worker_id, now)

    def drain(self, worker_id: WorkerId, now: float, on: bool = True) -> None:
        with self._recorder.call("drain", now, worker_id, on):
            super().drain(worker_id, now, on)

    def set_role(self, worker_id: WorkerId, role: Role, now: float) -> None:
        with self._recorder.call("role", now, worker_id, role):
            super().set_role(worker_id, role, now)

    def expire(self, now: float, silent_s: float) -> list[WorkerId]:
        lost = [m.worker_id for m in self.members() if not m.spec.from_config and now - m.seen_at > silent_s]
        if not lost:  # called several times a second: record only calls that change something
            return []
        with self._recorder.call("expire", now, silent_s):
            return super().expire(now, silent_s)

    def saw_probe(self, worker_id: WorkerId, *, live: bool, ready: bool, now: float) -> None:
        with self._recorder.call("probe", now, worker_id, live, ready):
            super().saw_probe(worker_id, live=live, ready=ready, now=now)

    def saw_models(self, worker_id: WorkerId, names: Sequence[str]) -> None:
        with self._recorder.call("models", worker_id, list(names)):
            super().saw_models(worker_id, names)

    def saw_report(self, worker_id: WorkerId, report: LoadReport, now: float) -> None:
        with self._recorder.call("report", now, worker_id, asdict(report)):
            super().saw_report(worker_id, report, now)

    def saw_prefill(self, worker_id: WorkerId, tokens: int, seconds: float) -> None:
        with self._recorder.call("prefill", worker_id, tokens, seconds):
            super().saw_prefill(worker_id, tokens, seconds)

    def saw_first_token(self, worker_id: WorkerId, now: float) -> None:
        with self._recorder.call("first_token", now, worker_id):
            super().saw_first_token(worker_id, now)

    def saw_success(self, worker_id: WorkerId, now: float) -> None:
        with self._recorder.call("success", now, worker_id):
            super().saw_success(worker_id, now)

    def saw_failure(self, worker_id: WorkerId, now: float, kind: str, began_s: float | None = None) -> None:
        with self._recorder.call("failure", now, worker_id, kind, began_s):
            super().saw_failure(worker_id, now, kind, began_s)

    def pool(self, model: str, now: float, roles: frozenset[Role] = frozenset(Role)) -> CandidatePool:
        if self._recorder.is_outside:
            known = self._pools.get((model, roles))
            if known is None or now >= known.until:  # building it updates the workers' rates
                self._recorder.note("pool", now, model, sorted(roles))
        return super().pool(model, now, roles)


class RecordedReservation(Reservation):
    """A reservation that knows its number."""

    number = -1

    def first_token(self, now: float) -> None:
        if self in self._load._prefilling:
            self._note("reservation_first", now)
        super().first_token(now)

    def end(self, now: float) -> None:
        if self._open:
            self._note("reservation_end", now)
        super().end(now)

    def _note(self, event: str, now: float) -> None:
        book = self._book
        assert isinstance(book, RecordedLoadBook)
        book.recorder.note(event, now, self.number)


class RecordedLoadBook(LoadBook):
    """A load book whose changes are noted. Reservations are numbered in the order in which they are made."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._num_reservations = 0

    def _new_reservation(
        self, worker_id: WorkerId, prefill: int, context: int, output: int, load: WorkerLoad
    ) -> Reservation:
        reservation = RecordedReservation(worker_id, prefill, context, output, load, self)
        reservation.number = self._num_reservations
        self._num_reservations += 1
        return reservation

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
        counts = (prefill_tokens, context_tokens, output_tokens)
        with self.recorder.call("reserve", now, worker_id, *counts, returning):
            return super().reserve(
                worker_id,
                prefill_tokens=prefill_tokens,
                context_tokens=context_tokens,
                output_tokens=output_tokens,
                now=now,
                returning=returning,
            )

    def load(self, worker_id: WorkerId, now: float, tokens_per_s: float = 0.0) -> WorkerLoad:
        if self.recorder.is_outside and self.changes_by_reading(worker_id, now, tokens_per_s):
            self.recorder.note("load", now, worker_id, tokens_per_s)
        return super().load(worker_id, now, tokens_per_s)

    def forget(self, worker_id: WorkerId) -> None:
        with self.recorder.call("load_forget", worker_id):
            super().forget(worker_id)


class RecordedIndex(PrefixIndex):
    """A prefix index whose changes are noted."""

    def __init__(self, recorder: Recorder, model: str, max_entries: int, losses: BlockLosses | None) -> None:
        super().__init__(max_entries, losses=losses)
        self._recorder = recorder
        self.model = model

    def match(self, keys: Sequence[Key]) -> PrefixMatches:
        matches = super().match(keys)
        self._recorder.matched(self.model, keys, matches)
        return matches

    def stored(self, worker_id: WorkerId, keys: Iterable[Key], medium: str = "GPU") -> None:
        keys = list(keys)
        with self._recorder.call("stored", self.model, worker_id, keys, medium):
            super().stored(worker_id, keys, medium)

    def removed(self, worker_id: WorkerId, keys: Iterable[Key], medium: str = "GPU") -> None:
        keys = list(keys)
        with self._recorder.call("removed", self.model, worker_id, keys, medium):
            super().removed(worker_id, keys, medium)

    def cleared(self, worker_id: WorkerId) -> None:
        with self._recorder.call("cleared", self.model, worker_id):
            super().cleared(worker_id)

    def share(self, worker_id: WorkerId, stores: Mapping[str, str]) -> None:
        with self._recorder.call("share", self.model, worker_id, dict(stores)):
            super().share(worker_id, stores)

    def set_capacity(self, worker_id: WorkerId, blocks: int | None) -> None:
        with self._recorder.call("capacity", self.model, worker_id, blocks):
            super().set_capacity(worker_id, blocks)

    def forget(self, worker_id: WorkerId) -> None:
        with self._recorder.call("index_forget", self.model, worker_id):
            super().forget(worker_id)


class RecordedIndexes(PrefixIndexes):
    """The prefix indexes of all models, whose changes are noted."""

    def __init__(self, recorder: Recorder, max_entries: int, losses: BlockLosses | None = None) -> None:
        super().__init__(max_entries, losses)
        self._recorder = recorder

    def __missing__(self, model: str) -> PrefixIndex:
        index = self[model] = RecordedIndex(self._recorder, model, self._max_entries, self._losses)
        return index

    def setdefault(self, model: str, index: PrefixIndex) -> PrefixIndex:  # type: ignore[override]
        """Let `model` be another name of an index's model."""
        if model not in self:
            assert isinstance(index, RecordedIndex)
            self._recorder.note("alias", model, index.model)
            self[model] = index
        return self[model]


class RecordedRouter(Router):
    """A router whose queries and decisions are noted."""

    def __init__(
        self,
        recorder: Recorder,
        fleet: RecordedFleet,
        load_book: RecordedLoadBook,
        indexes: RecordedIndexes,
        settings: RouterSettings,
    ) -> None:
        super().__init__(fleet, load_book, indexes, settings=settings)
        self._recorder = recorder

    def route(self, query: RouteQuery, now: float) -> Route:
        query = replace(query, session=_hashed(query.session), parent_session=_hashed(query.parent_session))
        last_key = self._recorder.conversation(query.keys)
        matches = self._recorder.match_number(query.matches)
        given = [_plain(getattr(query, name)) for name in QUERY_FIELDS]
        try:
            with self._recorder.call("route", now, last_key, matches, given):
                route = super().route(query, now)
        except StokerError as error:
            self._recorder.failed_route()
            self._recorder.note("refused", error.code)
            raise
        self._recorder.routed(route)
        prefill = None if route.prefill is None else route.prefill.worker.worker_id
        self._recorder.note("chosen", route.decode.worker.worker_id, prefill)
        return route


def _hashed(session: str | None) -> str | None:
    return None if session is None else blake2b(session.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, Collection) and not isinstance(value, str) else value
