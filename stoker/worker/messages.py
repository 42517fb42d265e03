"""`/v1/messages`: a Messages request runs as the chat request that it translates to; its pieces become a message or its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UnsetType

from stoker.base.errors import InvalidRequest
from stoker.proto.anthropic.answers import MessageObject, MessageTokenCount, MessageUsage, StopReason
from stoker.proto.anthropic.errors import message_error, message_error_event
from stoker.proto.anthropic.message_writer import MessageWriter
from stoker.proto.anthropic.messages import MessagesRequest
from stoker.proto.anthropic.to_chat import to_chat
from stoker.proto.handoff import KvTransferParams
from stoker.proto.internal_http import MESSAGES_PATH
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.errors import HttpError
from stoker.text.conversation import chat_conversation, is_constrained
from stoker.text.parsers.contract import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from stoker.text.tools import ToolPlan, chat_tools
from stoker.worker.choices import GenerationOptions, usage_report
from stoker.worker.constraint import resolve_constraint
from stoker.worker.context import CONTEXT, read_body
from stoker.worker.conversations import prepare_conversation
from stoker.worker.endpoint import AnswerSetup, GeneratingEndpoint
from stoker.worker.generate import AnswerPiece, Choice
from stoker.worker.guard import check_fields
from stoker.worker.handoff import transfer_params
from stoker.worker.input_tokens import num_prompt_tokens
from stoker.worker.stream import SseStream


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    setup: AnswerSetup
    choices: list[Choice]  # always one
    writer: MessageWriter
    max_tokens: int | None  # as the client set it
    num_sent: int | None  # resume: how many events the client has already, if the gateway knows

    def collector(self) -> MessageCollector:
        return MessageCollector(self)

    def events(self, stream: SseStream) -> MessageEvents:
        return MessageEvents(self, stream)

    def closing_events(self, transfer: KvTransferParams | UnsetType) -> None:
        return None

    def error_event(self, error: HttpError) -> bytes:
        return message_error_event(message_error(error.status, error.error, self.setup.request_id))

    def start(self) -> list[bytes]:
        self.writer.message.usage = self._usage()
        return self.writer.start()

    def push(self, piece: AnswerPiece) -> list[bytes]:
        """Return the events of `piece`, with those that end the message if it is the last one."""
        events: list[bytes] = []
        writer = self.writer
        for delta in piece.deltas:
            match delta:
                case TextDelta():
                    events += writer.text(delta.text)
                case ReasoningDelta():
                    events += writer.thinking(delta.text)
                case ToolCallStart():
                    events += writer.call(delta.index, delta.call_id, delta.name)
                case ToolArgumentsDelta():
                    events += writer.arguments(delta.index, delta.text)
        if piece.finish is not None:
            writer.message.kv_transfer_params = transfer_params(self.choices)
            stopped = self.choices[0].stops.stopped
            events += writer.finish(self._stop_reason(piece.finish), stopped, self._usage())
        return events

    def _stop_reason(self, finish: Literal["stop", "length"]) -> StopReason:
        choice = self.choices[0]
        if finish == "length":
            is_limit = self.max_tokens is None or choice.usage.completion_tokens < self.max_tokens
            return "model_context_window_exceeded" if is_limit else "max_tokens"
        if choice.stops.stopped is not None:
            return "stop_sequence"
        return "tool_use" if choice.has_called else "end_turn"

    def _usage(self) -> MessageUsage:
        report = usage_report(self.choices)
        cached = report.prompt_tokens_details.cached_tokens
        return MessageUsage.of(report.prompt_tokens, cached, report.completion_tokens)


async def prepare_message(setup: AnswerSetup, body: MessagesRequest) -> MessageAnswer:
    chat = to_chat(body)
    tools = _tools(chat, setup.context.config.max_tools)
    max_tokens = None if body.max_tokens == -1 else body.max_tokens
    options = GenerationOptions(
        prompt_param="messages",
        max_tokens=body.max_tokens,
        fits_context=True,
        constraint=resolve_constraint(chat, chat.response_format, "output_config.format"),
        continues_text=bool(chat.continue_final_message),
        hides_reasoning=chat.hides_reasoning,
    )
    prepared = await prepare_conversation(
        setup, chat, options, tools, lambda constrained: chat_conversation(chat, tools, constrained)
    )
    message = MessageObject(id=prepared.ids.make("msg_"), model=setup.model, usage=MessageUsage.of(0, 0, 0))
    num_sent = body.resume.events if body.resume is not None else None
    return MessageAnswer(setup, prepared.choices, MessageWriter(message), max_tokens, num_sent)


def _tools(chat: ChatRequest, max_tools: int) -> ToolPlan:
    """Check the translated tools. Errors name the fields as the client knows them."""
    try:
        return chat_tools(chat, max_tools)
    except InvalidRequest as wrong:
        wrong.param = _own_name(wrong.param or "")
        wrong.message = _own_name(wrong.message)
        raise


def _own_name(text: str) -> str:
    return text.replace("].function.parameters", "].input_schema").replace("].function", "]")


MESSAGES = GeneratingEndpoint(MESSAGES_PATH, MessagesRequest, prepare_message)


async def count_message_tokens(request: web.Request) -> web.Response:
    """Answer `/v1/messages/count_tokens`: how many tokens the prompt has. Nothing is generated."""
    context = request.app[CONTEXT]
    body = context.unknown_fields.decode(MessagesRequest, await read_body(request, context.config))
    check_fields(request, body)
    context.served_model(body.model)
    chat = to_chat(body)
    tools = _tools(chat, context.config.max_tools)
    constrained = is_constrained(chat, chat.response_format, tools)
    count = await num_prompt_tokens(context, chat, lambda: chat_conversation(chat, tools, constrained))
    return web.Response(body=msgspec.json.encode(MessageTokenCount(count)), content_type="application/json")


class MessageCollector:
    """Builds a message from the pieces."""

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer

    def take(self, piece: AnswerPiece) -> bool:
        self._answer.push(piece)
        return True

    async def wait_for_room(self) -> None: ...

    def result(self) -> MessageObject:
        return self._answer.writer.message


class MessageEvents:
    """Sends the events of each piece. A piece may have several."""

    def __init__(self, answer: MessageAnswer, stream: SseStream) -> None:
        self._answer = answer
        self._stream = stream
        self._num_events = 0
        self.wait_for_room = stream.wait_for_room

    def take(self, piece: AnswerPiece) -> bool:
        answer = self._answer
        events = [] if answer.writer.started else answer.start()
        events += answer.push(piece)
        first, self._num_events = self._num_events, self._num_events + len(events)
        if piece.replayed:
            # A token may have several events, and the stream may have been cut between them.
            sent = answer.num_sent
            events = [] if sent is None else events[max(0, sent - first) :]
        return self._stream.send(piece, b"".join(events))
