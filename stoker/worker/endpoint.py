"""The path of every generating request: decode the body, prepare the choices, run them, answer whole or as a stream.

An endpoint is a path, the type of its request, and a function that prepares an `EndpointAnswer`. Everything that differs
between the endpoints is in those.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import UnsetType

from stoker.base.errors import Overloaded
from stoker.proto.handoff import KvTransferParams
from stoker.proto.openai.decode import decode
from stoker.proto.openai.errors import HttpError
from stoker.proto.openai.fields import GenerationFields
from stoker.proto.openai.not_honoured import not_honoured
from stoker.proto.work import WORK_HEADER
from stoker.worker.context import CONTEXT, WorkerContext, read_body
from stoker.worker.generate import Choice, PieceSink, generate
from stoker.worker.guard import check_fields
from stoker.worker.handoff import moved_params, transfer_params
from stoker.worker.moves import PieceKeeper, move_name
from stoker.worker.note_writer import open_notes, wants_notes
from stoker.worker.record import RECORD
from stoker.worker.resume import created_of
from stoker.worker.stream import SseStream, open_stream

Fields = TypeVar("Fields", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class AnswerSetup:
    """What every answer has, whatever its endpoint."""

    context: WorkerContext
    request_id: str
    model: str
    created: int
    fingerprint: str
    continues_elsewhere: bool = False  # if the KV is kept: another worker continues after the first token


class Collector(PieceSink, Protocol):
    """Joins the pieces of an answer that is not streamed."""

    def result(self) -> msgspec.Struct: ...


class EndpointAnswer(Protocol):
    """One request on its way: its choices, and how their pieces become the answer of its API."""

    @property
    def setup(self) -> AnswerSetup: ...

    @property
    def choices(self) -> Sequence[Choice]: ...

    def collector(self) -> Collector: ...

    def events(self, stream: SseStream) -> PieceSink:
        """Return a sink that sends every piece as events."""

    def closing_events(self, transfer: KvTransferParams | UnsetType) -> bytes | None:
        """Return the events between the last choice and [DONE]. None: streams of this API end without [DONE]."""

    def error_event(self, error: HttpError) -> bytes:
        """Return the event that ends a stream with an error."""


@dataclass(frozen=True, slots=True)
class GeneratingEndpoint(Generic[Fields]):
    """One generating endpoint. `prepare` checks the request and makes its answer, without running it."""

    path: str
    request_type: type[Fields]
    prepare: Callable[[AnswerSetup, Fields], Awaitable[EndpointAnswer]]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        context = request.app[CONTEXT]
        body = context.unknown_fields.decode(self.request_type, await read_body(request, context.config))
        check_fields(request, body)
        request[RECORD].ignored_fields = not_honoured(body)
        has_notes, text = wants_notes(request, body), context.text
        name = move_name(request, has_notes or not body.stream)
        answer = await self._answer(context, body, request[RECORD].request_id, has_notes or name is not None)
        if context.text is not text:  # its tokens are those of the old model
            raise Overloaded(
                "This worker was given another model while it prepared this request; retry it.", code="model_switching"
            )
        prompts = sum(choice.request.num_prompt for choice in answer.choices if choice.counts_prompt)
        output = sum(choice.request.max_new_tokens for choice in answer.choices)
        work = request[RECORD].work = context.open_work.accept(request.headers.get(WORK_HEADER), prompts, output)
        try:
            with context.movable.open(name, answer.choices):
                return await (_stream(request, answer, has_notes) if body.stream else _whole(request, answer))
        finally:
            work.end()

    async def choices_of(
        self, context: WorkerContext, data: bytes, transfer: dict[str, Any] | None, request_id: str
    ) -> Sequence[Choice]:
        """Prepare the choices of a request body without running them, as if `transfer` were its `kv_transfer_params`."""
        body = decode(self.request_type, data)
        body.kv_transfer_params = transfer
        return (await self._answer(context, body, request_id, False)).choices

    def _answer(
        self, context: WorkerContext, body: Fields, request_id: str, continues_elsewhere: bool
    ) -> Awaitable[EndpointAnswer]:
        model, created = context.served_model(body.model), created_of(body)
        setup = AnswerSetup(context, request_id, model, created, context.fingerprint, continues_elsewhere)
        return self.prepare(setup, body)


async def _whole(request: web.Request, answer: EndpointAnswer) -> web.Response:
    collector = answer.collector()
    kept = PieceKeeper(collector)
    await generate(answer.setup.context.service, answer.choices, request[RECORD], kept)
    if any(choice.handed_off for choice in answer.choices):
        return kept.moved_answer(answer.choices, answer.setup.created)
    return web.Response(body=msgspec.json.encode(collector.result()), content_type="application/json")


async def _stream(request: web.Request, answer: EndpointAnswer, has_notes: bool) -> web.StreamResponse:
    context = answer.setup.context
    notes = open_notes(has_notes, answer.choices, answer.setup.created)
    stream = open_stream(request, context.config.client_stall_s, notes, answer.error_event)
    await generate(context.service, answer.choices, request[RECORD], answer.events(stream))
    if any(choice.handed_off for choice in answer.choices):
        return await stream.hand_off(moved_params(answer.choices))
    transfer = transfer_params(answer.choices)
    closing = answer.closing_events(transfer)
    return await (stream.end() if closing is None else stream.done(closing))
