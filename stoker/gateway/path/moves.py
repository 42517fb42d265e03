"""Moves running requests away from a worker that drains: their next tokens come from other workers, which pull their KV.

Each request to a Stoker worker has a name (`proto/moves.py`). To move the requests of a worker, the gateway posts their names. The
worker ends each with a hand-off, and the proxy continues it on another worker. Only requests that another worker can continue are
moved; the others finish where they are. The worker may get a request just before it drains, so the names are sent again until no
request is left.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.spec import Role
from stoker.gateway.http import NoSocketLeft, ResponseAborted, ResponseLost, Unreachable, WorkerResponse, header_block
from stoker.gateway.path.upstream import Upstream, Upstreams
from stoker.proto.internal_http import DUTY_PATH, MOVE_HEADER, MOVE_PATH
from stoker.proto.moves import MAX_MOVED, DutyRequest, encode_duty_request, encode_move_request
from stoker.proto.openai.errors import error_message

_MOVE = MOVE_PATH.encode()
_DUTY = DUTY_PATH.encode()
_JSON = header_block([(b"content-type", b"application/json")])
_AGAIN_S = 0.1  # the pause before the names of requests that still run are sent again
_MOVE_S = 60.0  # the longest that one move takes; requests that still run then finish where they are
_ANSWER_S = 3.0
_MAX_ANSWER_BYTES = 1 << 16
_FAILURES = (Unreachable, NoSocketLeft, ResponseLost, ResponseAborted, TimeoutError)

log = EventLog("moves")


@dataclass(slots=True, eq=False)
class MovableLeg:
    """A request that runs on a worker, and that other workers can continue."""

    name: str
    model: str
    asked: bool = False  # the worker was asked to hand it off

    @property
    def header(self) -> bytes:
        return header_block([(MOVE_HEADER.encode(), self.name.encode())])


class Moves:
    """The movable requests of all workers, and the moves that are in progress."""

    def __init__(
        self, fleet: Fleet, upstreams: Upstreams, clock: Callable[[], float], dialects: frozenset[str] = frozenset()
    ) -> None:
        """`dialects` are those of workers that can continue a request."""
        self._fleet = fleet
        self._upstreams = upstreams
        self._clock = clock
        self.dialects = dialects
        self._legs: dict[WorkerId, set[MovableLeg]] = {}
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._prefix = secrets.token_hex(8)
        self._count = 0

    @contextmanager
    def open(self, worker_id: WorkerId, model: str) -> Iterator[MovableLeg]:
        """Let a request be moved while this context is open."""
        self._count += 1
        leg = MovableLeg(f"{self._prefix}.{self._count}", model)
        legs = self._legs.setdefault(worker_id, set())
        legs.add(leg)
        try:
            yield leg
        finally:
            legs.discard(leg)
            if not legs:
                self._legs.pop(worker_id, None)

    def num_running(self, worker_id: WorkerId) -> int:
        """Return how many movable requests run on a worker."""
        return len(self._legs.get(worker_id, ()))

    def stuck_models(self, worker_id: WorkerId) -> set[str]:
        """Return the models of requests on this worker that no other worker can continue now."""
        models = {leg.model for leg in self._legs.get(worker_id, ())}
        return {model for model in models if not self._has_target(worker_id, model)}

    def begin(self, member: Member) -> None:
        """Start to move the requests that a worker runs now, if there are any. Does nothing while it already moves some."""
        worker_id = member.worker_id
        if worker_id in self._tasks or not self._movable(worker_id):
            return
        legs = set(self._legs[worker_id])
        task = self._tasks[worker_id] = asyncio.create_task(self._move(member, legs), name=f"move-{worker_id}")
        task.add_done_callback(lambda _: self._tasks.pop(worker_id, None))

    async def change_duty(self, member: Member, duty: DutyRequest) -> str | None:
        """Tell a worker its duty, so that all gateways follow. Return why it did not accept it, or None if it did."""
        upstream = self._upstreams.apart(member)
        try:
            answer, body = await self._post(upstream, _DUTY, encode_duty_request(duty))
            return None if answer.status < 300 else f"status {answer.status}: {error_message(body)}"
        except _FAILURES as error:
            return str(error) or "no answer before the deadline"
        finally:
            upstream.pool.close()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _movable(self, worker_id: WorkerId) -> list[MovableLeg]:
        stuck = self.stuck_models(worker_id)
        return [leg for leg in self._legs.get(worker_id, ()) if leg.model not in stuck]

    def _has_target(self, worker_id: WorkerId, model: str) -> bool:
        return any(
            other.worker_id != worker_id and other.spec.dialect in self.dialects and other.spec.role is not Role.PREFILL
            for other in self._fleet.pool(model, self._clock()).members
        )

    async def _move(self, member: Member, chosen: set[MovableLeg]) -> None:
        worker_id, began_s = member.worker_id, asyncio.get_running_loop().time()
        upstream = self._upstreams.apart(member)
        try:
            async with asyncio.timeout(_MOVE_S):
                while legs := [leg for leg in self._movable(worker_id) if leg in chosen][:MAX_MOVED]:
                    for leg in legs:
                        leg.asked = True
                    await self._ask(upstream, worker_id, [leg.name for leg in legs])
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            log.warning("move_unfinished", worker=worker_id, left=self._num_left(worker_id, chosen), seconds=_MOVE_S)
            return
        finally:
            upstream.pool.close()
        seconds, left = asyncio.get_running_loop().time() - began_s, self._num_left(worker_id, chosen)
        log.event("worker_moved", worker=worker_id, requests=len(chosen), left=left, seconds=round(seconds, 3))

    def _num_left(self, worker_id: WorkerId, chosen: set[MovableLeg]) -> int:
        return len(chosen & self._legs.get(worker_id, set()))

    async def _ask(self, upstream: Upstream, worker_id: WorkerId, names: list[str]) -> None:
        try:
            answer, _ = await self._post(upstream, _MOVE, encode_move_request(names))
            if answer.status >= 300:  # an old version: its requests finish there
                log.warning("move_refused", worker=worker_id, status=answer.status)
        except _FAILURES as error:  # it may have ended: its requests break, and are resumed
            log.warning("move_not_asked", worker=worker_id, reason=str(error) or "no answer before the deadline")

    async def _post(self, upstream: Upstream, path: bytes, body: bytes) -> tuple[WorkerResponse, bytes]:
        async with asyncio.timeout(_ANSWER_S):
            headers = _JSON + upstream.headers
            answer = await upstream.pool.send(b"POST", path, headers, body, connect_s=_ANSWER_S, head_s=None)
            return answer, await answer.read(_MAX_ANSWER_BYTES)
