"""`/stoker/move` and `/stoker/duty`: hand running requests off to other workers, drain, and change the role.

The gateway that sent a request asks to move it, because only the gateway knows whether another worker can continue it. A worker
that drains reports that it wants its requests moved (`WorkerReport.moving`), and its gateways ask then.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
from aiohttp import web

from stoker.proto.handoff import lease_id
from stoker.proto.internal_http import MOVE_HEADER
from stoker.proto.moves import MAX_NAME_CHARS, DutyRequest, MoveRequest, WorkerDuty
from stoker.proto.openai.decode import decode
from stoker.worker.context import CONTEXT, Service, WorkerContext, read_body
from stoker.worker.generate import AnswerPiece, Choice, PieceSink
from stoker.worker.handoff import moved_params
from stoker.worker.note_writer import StreamNotes

_POLL_S = 0.05


class MovableRequests:
    """The running requests that their gateways can move, by the names that the gateways gave them."""

    def __init__(self) -> None:
        self._choices: dict[str, Sequence[Choice]] = {}

    @contextmanager
    def open(self, name: str | None, choices: Sequence[Choice]) -> Iterator[None]:
        """Let a request be moved while it runs. A request without a name, or with one that is in use, stays."""
        if name is None or not 0 < len(name) <= MAX_NAME_CHARS or name in self._choices:
            yield
            return
        self._choices[name] = choices
        try:
            yield
        finally:
            del self._choices[name]

    def move(self, names: Sequence[str], service: Service) -> int:
        """Hand off the requests with these names. Return how many there are."""
        known = [self._choices[name] for name in names if name in self._choices]
        for choices in known:
            transfer_id = uuid.uuid4().hex
            for choice in choices:
                service.hand_off(choice.request.request_id, lease_id(transfer_id, choice.index))
        return len(known)


class PieceKeeper:
    """Passes the pieces of an answer that is not streamed to its collector, and keeps them in case it moves."""

    def __init__(self, sink: PieceSink) -> None:
        self._sink = sink
        self.wait_for_room = sink.wait_for_room
        self._pieces: list[AnswerPiece] = []

    def take(self, piece: AnswerPiece) -> bool:
        self._pieces.append(piece)
        return self._sink.take(piece)

    def moved_answer(self, choices: Sequence[Choice], created: int) -> web.Response:
        """Return the answer so far as notes, from which another worker continues it."""
        notes = StreamNotes(choices, created)
        lines = b"".join(notes.of_piece(piece) for piece in self._pieces)
        body = lines + notes.of_handoff(moved_params(choices)) + b"\n"
        return web.Response(body=body, content_type="text/event-stream")


def move_name(request: web.Request, can_continue: bool) -> str | None:
    """Return the name under which the gateway can move this request, or None if it cannot continue it elsewhere."""
    return request.headers.get(MOVE_HEADER) if can_continue else None


async def move(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body = decode(MoveRequest, await read_body(request, context.config))
    num_known = context.movable.move(body.names, context.service)
    context.log.event("requests_move", asked=len(body.names), known=num_known)
    return web.json_response({"moving": num_known}, status=202)


async def change_duty(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    if context.identity.secret is None:
        raise web.HTTPForbidden(text="A worker without --secret-file keeps its role and its state: give it a secret.")
    wanted = decode(DutyRequest, await read_body(request, context.config))
    _change(context, wanted)
    state = context.state
    context.log.event("duty", role=context.identity.role, draining=state.draining, moving=state.moving)
    duty = WorkerDuty(role=context.identity.role, draining=state.draining, moving=state.moving)
    return web.Response(body=msgspec.json.encode(duty), content_type="application/json")


def _change(context: WorkerContext, wanted: DutyRequest) -> None:
    if wanted.role is not None:
        context.identity = replace(context.identity, role=wanted.role, role_assigned=True)
    if wanted.draining is True:
        context.state.begin_drain("operator", moves=wanted.moving)
    elif wanted.draining is False:
        context.state.end_drain("operator")
    context.report_now()


async def wait_pulled(service: Service, seconds: float) -> None:
    """Wait until other workers have pulled the KV of moved requests, at most `seconds`. They compute it otherwise."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if not (service.ready and service.stats is not None and service.stats.held_leases):
            return
        await asyncio.sleep(_POLL_S)
