"""`/v1/responses` without stored state: the request holds the whole conversation, and the answer is not kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UnsetType

from stoker.base.errors import InvalidRequest
from stoker.proto.handoff import KvTransferParams
from stoker.proto.internal_http import RESPONSES_PATH
from stoker.proto.openai.errors import HttpError
from stoker.proto.openai.responses import ResponseEvent, ResponseObject, ResponsesRequest
from stoker.proto.sse import encode_event
from stoker.text.conversation import responses_conversation
from stoker.text.response_tools import responses_tools
from stoker.worker.choices import GenerationOptions, usage_report
from stoker.worker.constraint import resolve_constraint
from stoker.worker.conversations import prepare_conversation
from stoker.worker.endpoint import AnswerSetup, GeneratingEndpoint
from stoker.worker.generate import AnswerPiece, Choice
from stoker.worker.handoff import transfer_params
from stoker.worker.responses_writer import ResponseWriter
from stoker.worker.stream import SseStream


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    setup: AnswerSetup
    choices: list[Choice]  # always one
    writer: ResponseWriter
    num_sent: int | None  # resume: how many events the client has already, if the gateway knows

    def collector(self) -> ResponseCollector:
        return ResponseCollector(self)

    def events(self, stream: SseStream) -> ResponseEvents:
        return ResponseEvents(self, stream)

    def closing_events(self, transfer: KvTransferParams | UnsetType) -> None:
        return None

    def error_event(self, error: HttpError) -> bytes:
        return _encode(self.writer.fail(error.error.message))

    def push(self, piece: AnswerPiece) -> list[ResponseEvent]:
        """Return the events of `piece`, with those that end the response if it is the last one."""
        events = self.writer.push(piece)
        if piece.finish is not None:
            events += self._finish(piece.finish)
        return events

    def _finish(self, reason: Literal["stop", "length"]) -> list[ResponseEvent]:
        self.writer.response.kv_transfer_params = transfer_params(self.choices)
        return self.writer.finish(reason, usage_report(self.choices))


async def prepare_response(setup: AnswerSetup, body: ResponsesRequest) -> ResponseAnswer:
    context = setup.context
    refuse_unsupported(body)
    tools = responses_tools(body, context.config.max_tools)
    with_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    options = GenerationOptions(
        prompt_param="input",
        max_tokens=body.max_output_tokens,
        max_tokens_param="max_output_tokens",
        num_logprobs=(body.top_logprobs or 0) if with_logprobs else None,
        constraint=resolve_constraint(body, body.text.format if body.text else None, "text.format"),
        drops_oldest=body.truncation == "auto",
    )
    prepared = await prepare_conversation(
        setup, body, options, tools.plan, lambda constrained: responses_conversation(body, tools.plan, constrained)
    )
    response = ResponseObject.of(body, prepared.ids.make("resp_"), setup.created, setup.model)
    encodes_reasoning = "reasoning.encrypted_content" in (body.include or ())
    writer = ResponseWriter(
        response, context.text.tokenizer.token_bytes, prepared.ids, tools.by_name, encodes_reasoning=encodes_reasoning
    )
    num_sent = body.resume.events if body.resume is not None else None
    return ResponseAnswer(setup, prepared.choices, writer, num_sent)


RESPONSES = GeneratingEndpoint(RESPONSES_PATH, ResponsesRequest, prepare_response)


def refuse_unsupported(body: ResponsesRequest) -> None:
    stateless = "this server is stateless: send the whole conversation in 'input'"
    for name, reason in (
        ("previous_response_id", stateless),
        ("conversation", stateless),
        ("prompt", "stored prompts are not available"),
        ("image", "this model generates only text"),
    ):
        if getattr(body, name) is not None:
            raise InvalidRequest(
                f"Unsupported parameter: '{name}': {reason}.", param=name, code="unsupported_parameter"
            )
    if body.background:
        raise InvalidRequest(f"Unsupported value: 'background': {stateless}.", param="background")


class ResponseCollector:
    """Builds a response object from the pieces."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer

    def take(self, piece: AnswerPiece) -> bool:
        self._answer.push(piece)
        return True

    async def wait_for_room(self) -> None: ...

    def result(self) -> ResponseObject:
        return self._answer.writer.response


class ResponseEvents:
    """Sends the events of each piece. A piece may have several."""

    def __init__(self, answer: ResponseAnswer, stream: SseStream) -> None:
        self._answer = answer
        self._stream = stream
        self.wait_for_room = stream.wait_for_room

    def take(self, piece: AnswerPiece) -> bool:
        answer = self._answer
        events = [] if answer.writer.started else answer.writer.start()
        events += answer.push(piece)
        if piece.replayed:
            # A token may have several events, and the stream may have been cut between them.
            sent = answer.num_sent
            events = [] if sent is None else [event for event in events if event.sequence_number >= sent]
        return self._stream.send(piece, _encode(events))


def _encode(events: list[ResponseEvent]) -> bytes:
    return b"".join(encode_event(msgspec.json.encode(event), event.type) for event in events)
