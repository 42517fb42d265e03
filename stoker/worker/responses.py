"""`/v1/responses`, without state: all of the conversation is in the request, and nothing is kept of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.decode import decode
from stoker.proto.openai.fields import ResponseFormat
from stoker.proto.openai.responses import ReasoningConfig, ResponseEvent, ResponseObject, ResponsesRequest, TextConfig
from stoker.proto.sse import encode_event
from stoker.text.conversation import num_chars, responses_conversation
from stoker.text.tools import ToolPlan, responses_tools
from stoker.worker.constraint import resolve_constraint
from stoker.worker.context import CONTEXT, WorkerContext, read_body
from stoker.worker.errors import Problem
from stoker.worker.generate import Choice, Piece, generate
from stoker.worker.handoff import transfer_params
from stoker.worker.ids import AnswerIds
from stoker.worker.journal import open_journal, wants_journal
from stoker.worker.output import OutputParser
from stoker.worker.prompt import (
    Asked,
    Prompt,
    call_ids,
    chat_parser,
    forced_constraint,
    make_choices,
    needs_special_tokens,
    render,
    usage_report,
)
from stoker.worker.record import RECORD
from stoker.worker.responses_writer import ResponseWriter
from stoker.worker.resume import created_of
from stoker.worker.sampling import check_token_ids
from stoker.worker.stream import SseStream, open_stream


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    choice: Choice
    response: ResponseObject
    ids: AnswerIds
    num_sent: int | None  # events that the client has from before, where that is known


async def responses(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = decode(ResponsesRequest, await read_body(request, context.config))
    answer = await prepare_response(context, body, request[RECORD].request_id, goes_on=wants_journal(request, body))
    writer = ResponseWriter(answer.response, context.text.tokenizer.token_bytes, answer.ids)
    if body.stream:
        return await _stream(request, answer, writer)
    await generate(context.service, [answer.choice], request[RECORD], _Whole(answer.choice, writer))
    return web.Response(body=msgspec.json.encode(writer.response), content_type="application/json")


class _Whole:
    def __init__(self, choice: Choice, writer: ResponseWriter) -> None:
        self._choice = choice
        self._writer = writer

    def take(self, piece: Piece) -> bool:
        self._writer.push(piece)
        if piece.finish is not None:
            _finish(self._writer, piece.finish, self._choice)
        return True

    async def room(self) -> None: ...


class _Events:
    def __init__(self, answer: ResponseAnswer, writer: ResponseWriter, stream: SseStream) -> None:
        self._answer = answer
        self._writer = writer
        self._stream = stream
        self.room = stream.room

    def take(self, piece: Piece) -> bool:
        writer, num_sent = self._writer, self._answer.num_sent
        events = [] if writer.started else writer.start()
        events += writer.push(piece)
        if piece.finish is not None:
            events += _finish(writer, piece.finish, self._answer.choice)
        if piece.replayed:
            # A token may make several events, and the stream may have been cut between them.
            events = [] if num_sent is None else [event for event in events if event.sequence_number >= num_sent]
        return self._stream.send(piece, _encode(events))


async def _stream(request: web.Request, answer: ResponseAnswer, writer: ResponseWriter) -> web.StreamResponse:
    def failed(problem: Problem) -> bytes:
        return _encode(writer.fail(problem.body.message))

    context, choice = request.app[CONTEXT], answer.choice
    journal = open_journal(request, [choice], answer.response.created_at)
    stream = open_stream(request, context.config.client_stall_s, journal, failed)
    await generate(context.service, [choice], request[RECORD], _Events(answer, writer, stream))
    transfer = transfer_params([choice])
    if transfer is not UNSET and choice.goes_on:
        return await stream.hand_off(transfer)
    return await stream.end()


def _finish(writer: ResponseWriter, reason: Literal["stop", "length"], choice: Choice) -> list[ResponseEvent]:
    writer.response.kv_transfer_params = transfer_params([choice])
    return writer.finish(reason, usage_report([choice]))


def _encode(events: list[ResponseEvent]) -> bytes:
    return b"".join(encode_event(msgspec.json.encode(event), event.type) for event in events)


async def prepare_response(
    context: WorkerContext, body: ResponsesRequest, request_id: str, *, goes_on: bool = False
) -> ResponseAnswer:
    """`goes_on`: if its KV is to be kept, another worker is to end what this one begins."""
    model = context.served_model(body.model)
    _refuse_unsupported(body)
    tools = responses_tools(body, context.config.max_tools)
    constraint = resolve_constraint(body, body.text.format if body.text else None, "text.format")
    constraint = forced_constraint(context.text, constraint, tools)
    prompt = await _prompt(context, body, tools, constrained=constraint is not None)
    with_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    created = created_of(body)
    ids = AnswerIds.of(request_id, created, prompt.token_ids)

    def new_parser(choice: int) -> OutputParser:
        constrained, call_id = constraint is not None, call_ids(ids, choice)
        return chat_parser(context.text, prompt, tools, constrained=constrained, split=True, call_id=call_id)

    choices = make_choices(
        context,
        body,
        Asked(
            prompt_param="input" if body.prompt_token_ids is None else "prompt_token_ids",
            max_tokens=body.max_output_tokens,
            max_tokens_param="max_output_tokens",
            num_logprobs=(body.top_logprobs or 0) if with_logprobs else None,
            constraint=constraint,
            goes_on=goes_on,
        ),
        prompt,
        new_parser,
        keep_special_tokens=needs_special_tokens(context.text, tools),
    )
    num_sent = body.resume.events if body.resume is not None else None
    return ResponseAnswer(choices[0], _response_object(body, ids.make("resp_"), model, created), ids, num_sent)


def _refuse_unsupported(body: ResponsesRequest) -> None:
    stateless = "this server is stateless: send the whole conversation in 'input'"
    for name, why in (
        ("previous_response_id", stateless),
        ("conversation", stateless),
        ("prompt", "stored prompts are not available"),
        ("image", "this model gives text alone"),
    ):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"Unsupported parameter: '{name}': {why}.", param=name, code="unsupported_parameter")
    if body.background:
        raise InvalidRequest(f"Unsupported value: 'background': {stateless}.", param="background")


async def _prompt(context: WorkerContext, body: ResponsesRequest, tools: ToolPlan, constrained: bool) -> Prompt:
    if body.prompt_token_ids is not None:
        return Prompt(check_token_ids(body.prompt_token_ids, "prompt_token_ids", context.limits))
    conversation = responses_conversation(body, tools, constrained)
    return await context.off_loop(num_chars(conversation), lambda: render(context.text, conversation, context.limits))


def _response_object(body: ResponsesRequest, answer_id: str, model: str, created: int) -> ResponseObject:
    return ResponseObject(
        id=answer_id,
        created_at=created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or ReasoningConfig(),
        temperature=1.0 if body.temperature is None else body.temperature,
        text=TextConfig(format=(body.text and body.text.format) or ResponseFormat(type="text")),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
