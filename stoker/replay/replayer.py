"""Replayer: runs a recording again through the real routing classes.

With the recorded policy, every decision is made again: any difference is a defect. With another policy, that policy chooses and
reserves, while the fleet, the KV events and the times stay as recorded. The workers' caches then follow the recorded choices, so
the result is an estimate: `stoker trace export` and `stoker sim` run the same requests on simulated workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from stoker.base.errors import ConfigError, StokerError
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, FleetSettings
from stoker.fleet.load_book import LoadBook, Reservation
from stoker.fleet.prefix_index import Key
from stoker.fleet.prefix_matches import PrefixMatches
from stoker.fleet.spec import LoadReport, Role, WorkerSpec
from stoker.replay.recorder import KEPT_MATCHES, QUERY_FIELDS
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

Choice = tuple[WorkerId, WorkerId | None] | str  # decode and prefill worker, or the code of the refusal


@dataclass(slots=True)
class RecordedRequest:
    """One routed request of a recording."""

    at_s: float
    query: RouteQuery
    choice: Choice = ""
    cached_tokens: int = 0  # as expected when it was replayed
    output_tokens: int | None = None  # None: it was not answered
    ttft_s: float | None = None
    is_retry: bool = False


@dataclass(slots=True)
class ReplaySummary:
    """The decisions of a replay, beside the recorded ones."""

    num_decisions: int = 0
    num_different: int = 0
    first_different: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # expected by the replayed decisions
    requests_of: Counter[str] = field(default_factory=Counter)

    @property
    def skew(self) -> float:
        """Return the largest number of requests of a worker, relative to the mean."""
        counts = self.requests_of.values()
        return max(counts) * len(counts) / sum(counts) if counts else 0.0


class Replayer:
    """See the module docstring. Call `run` once."""

    def __init__(self, header: dict[str, Any], policy: str | None = None) -> None:
        try:
            router = msgspec.convert(header["router"], RouterSettings)
            fleet = msgspec.convert(header["fleet"], FleetSettings)
            max_entries = int(header["index_blocks"])
        except (KeyError, msgspec.ValidationError) as error:
            raise ConfigError(f"the recording's settings are not those of this version: {error}") from None
        if policy is not None:
            router = replace(router, policy=policy)
        self._fleet = Fleet(fleet)
        self._book = LoadBook()
        self._indexes = PrefixIndexes(max_entries)
        self._router = Router(self._fleet, self._book, self._indexes, settings=router)
        self._reservations: dict[int, list[Reservation]] = {}
        self._num_reservations = 0
        self._keys: list[tuple[Key, int]] = []
        self._matches: dict[int, PrefixMatches] = {}
        self._num_matches = 0
        self._replayed: Route | str = ""
        self._requests: list[RecordedRequest] = []
        self.summary = ReplaySummary()
        self._apply: dict[str, Callable[..., object]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    def run(self, events: Iterable[list[Any]]) -> list[RecordedRequest]:
        """Apply all events in order. Return the requests."""
        for number, event in enumerate(events):
            try:
                self._apply[event[0]](*event[1:])
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
                raise ConfigError(f"event {number} of the recording cannot be replayed: {error!r}") from error
        return self._requests

    # ---- keys and decisions

    def _on_keys_reset(self) -> None:
        self._keys.clear()

    def _on_keys(self, parent: int, keys: Sequence[Key]) -> None:
        for key in keys:
            self._keys.append((key, parent))
            parent = len(self._keys) - 1

    def _conversation(self, last: int) -> list[Key]:
        found = []
        while last >= 0:
            key, last = self._keys[last]
            found.append(key)
        return found[::-1]

    def _on_match(self, model: str, last_key: int) -> None:
        self._matches[self._num_matches] = self._indexes[model].match(self._conversation(last_key))
        self._num_matches += 1
        self._matches.pop(self._num_matches - KEPT_MATCHES - 1, None)

    def _on_route(self, now: float, last_key: int, matched: int | None, given: list[Any]) -> None:
        options = dict(zip(QUERY_FIELDS, given, strict=True))
        options["excluded"] = frozenset(options["excluded"])
        if options["needs_dialect"] is not None:
            options["needs_dialect"] = frozenset(options["needs_dialect"])
        query = RouteQuery(keys=self._conversation(last_key), **options)
        query.matches = None if matched is None else self._matches[matched]
        self._requests.append(RecordedRequest(now, query, is_retry=bool(query.excluded)))
        try:
            self._replayed = self._router.route(query, now)
        except StokerError as error:
            self._replayed = error.code

    def _on_chosen(self, decode: str, prefill: str | None) -> None:
        request = self._decided((WorkerId(decode), None if prefill is None else WorkerId(prefill)))
        route, first = self._replayed, self._num_reservations
        self._num_reservations += 1 if prefill is None else 2
        if isinstance(route, str):
            return
        # Where the policy is another one, its reservations end with those of the recorded route.
        self._reservations[first] = [route.decode.reservation]
        if route.prefill is not None:
            number = first if prefill is None else first + 1
            self._reservations.setdefault(number, []).append(route.prefill.reservation)
        leg = route.prefill or route.decode
        request.cached_tokens = leg.cached_tokens
        self.summary.prompt_tokens += request.query.num_tokens
        self.summary.cached_tokens += leg.cached_tokens
        self.summary.requests_of[route.decode.worker.worker_id] += 1

    def _on_refused(self, code: str) -> None:
        self._decided(code)
        if isinstance(self._replayed, Route):
            self._replayed.end(self._requests[-1].at_s)

    def _decided(self, recorded: Choice) -> RecordedRequest:
        """Compare the replayed decision with the recorded one."""
        request, route = self._requests[-1], self._replayed
        request.choice = recorded
        replayed: Choice = route if isinstance(route, str) else _choice(route)
        summary = self.summary
        summary.num_decisions += 1
        if replayed != recorded:
            summary.num_different += 1
            summary.first_different = summary.first_different or (
                f"decision {summary.num_decisions} at {request.at_s:.6f} s: {_words(recorded)} was recorded,"
                f" and {_words(replayed)} was replayed"
            )
        return request

    def _on_answer(self, now: float, number: int, prompt: int, cached: int, output: int, ttft_s: float) -> None:
        request = self._requests[number]
        request.output_tokens, request.ttft_s = output, ttft_s

    # ---- load book

    def _on_reserve(self, now: float, worker_id: str, prefill: int, context: int, output: int, returning: bool) -> None:
        self._reservations[self._num_reservations] = [
            self._book.reserve(
                WorkerId(worker_id),
                prefill_tokens=prefill,
                context_tokens=context,
                output_tokens=output,
                now=now,
                returning=returning,
            )
        ]
        self._num_reservations += 1

    def _on_reservation_first(self, now: float, number: int) -> None:
        for reservation in self._reservations.get(number, ()):
            reservation.first_token(now)

    def _on_reservation_end(self, now: float, number: int) -> None:
        for reservation in self._reservations.pop(number, ()):
            reservation.end(now)

    def _on_load(self, now: float, worker_id: str, tokens_per_s: float) -> None:
        self._book.load(WorkerId(worker_id), now, tokens_per_s)

    def _on_load_forget(self, worker_id: str) -> None:
        self._book.forget(WorkerId(worker_id))

    # ---- fleet

    def _on_add(self, now: float, spec: dict[str, Any]) -> None:
        self._fleet.add(msgspec.convert(spec, WorkerSpec), now)

    def _on_remove(self, now: float, worker_id: str) -> None:
        self._fleet.remove(WorkerId(worker_id), now)

    def _on_drain(self, now: float, worker_id: str, on: bool) -> None:
        self._fleet.drain(WorkerId(worker_id), now, on)

    def _on_role(self, now: float, worker_id: str, role: str) -> None:
        self._fleet.set_role(WorkerId(worker_id), Role(role), now)

    def _on_expire(self, now: float, silent_s: float) -> None:
        self._fleet.expire(now, silent_s)

    def _on_probe(self, now: float, worker_id: str, live: bool, ready: bool) -> None:
        self._fleet.saw_probe(WorkerId(worker_id), live=live, ready=ready, now=now)

    def _on_models(self, worker_id: str, names: list[str]) -> None:
        self._fleet.saw_models(WorkerId(worker_id), names)

    def _on_report(self, now: float, worker_id: str, report: dict[str, Any]) -> None:
        self._fleet.saw_report(WorkerId(worker_id), msgspec.convert(report, LoadReport), now)

    def _on_prefill(self, worker_id: str, tokens: int, seconds: float) -> None:
        self._fleet.saw_prefill(WorkerId(worker_id), tokens, seconds)

    def _on_first_token(self, now: float, worker_id: str) -> None:
        self._fleet.saw_first_token(WorkerId(worker_id), now)

    def _on_success(self, now: float, worker_id: str) -> None:
        self._fleet.saw_success(WorkerId(worker_id), now)

    def _on_failure(self, now: float, worker_id: str, kind: str, began_s: float | None) -> None:
        self._fleet.saw_failure(WorkerId(worker_id), now, kind, began_s)

    def _on_pool(self, now: float, model: str, roles: list[str]) -> None:
        self._fleet.pool(model, now, frozenset(map(Role, roles)))

    # ---- prefix indexes

    def _on_alias(self, model: str, other: str) -> None:
        self._indexes[model] = self._indexes[other]

    def _on_stored(self, model: str, worker_id: str, keys: list[Key], medium: str) -> None:
        self._indexes[model].stored(WorkerId(worker_id), keys, medium)

    def _on_removed(self, model: str, worker_id: str, keys: list[Key], medium: str) -> None:
        self._indexes[model].removed(WorkerId(worker_id), keys, medium)

    def _on_cleared(self, model: str, worker_id: str) -> None:
        self._indexes[model].cleared(WorkerId(worker_id))

    def _on_share(self, model: str, worker_id: str, stores: dict[str, str]) -> None:
        self._indexes[model].share(WorkerId(worker_id), stores)

    def _on_capacity(self, model: str, worker_id: str, blocks: int | None) -> None:
        self._indexes[model].set_capacity(WorkerId(worker_id), blocks)

    def _on_index_forget(self, model: str, worker_id: str) -> None:
        self._indexes[model].forget(WorkerId(worker_id))


def _choice(route: Route) -> Choice:
    return route.decode.worker.worker_id, None if route.prefill is None else route.prefill.worker.worker_id


def _words(choice: Choice) -> str:
    if isinstance(choice, str):
        return f"the refusal {choice}"
    decode, prefill = choice
    return decode if prefill is None else f"{prefill} with {decode}"
