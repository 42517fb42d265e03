"""Translates the chat answer of a foreign worker, streamed or whole, to a message of Anthropic's API."""

from __future__ import annotations

import re

import msgspec

from stoker.gateway.path.call import Call
from stoker.gateway.path.rewrite import ForeignAnswer
from stoker.proto.anthropic.answers import MessageObject, MessageUsage, StopReason
from stoker.proto.anthropic.errors import message_error, message_error_event
from stoker.proto.anthropic.message_writer import MessageWriter
from stoker.proto.openai.errors import ErrorObject

_DATA = re.compile(rb"^data: ?([^\r\n]*)", re.MULTILINE)
_DONE = b"[DONE]"
_BROKEN = 500  # the status of an error in mid-stream


class _FunctionPart(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPart(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _FunctionPart | None = None


class _AnswerPart(msgspec.Struct):
    """A message, or a delta of one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_CallPart] | None = None


class _ChoicePart(msgspec.Struct):
    message: _AnswerPart | None = None
    delta: _AnswerPart | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # of vLLM: the stop string that was found


class _ChatPart(msgspec.Struct):
    """A chat completion, or a chunk of one."""

    id: str = ""
    model: str = ""
    choices: list[_ChoicePart] = []
    error: ErrorObject | None = None


_NOT_CHAT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DECODER = msgspec.json.Decoder(_ChatPart)


class TranslatedAnswer(ForeignAnswer):
    """A foreign worker's chat answer. The client gets a message."""

    __slots__ = ("_finish", "_model", "_num_calls", "_shows_thinking", "_stopped", "_writer")

    def translate_for(self, call: Call) -> None:
        self._writer: MessageWriter | None = None  # made with the first part
        self._model = call.query.model
        self._shows_thinking = bool(call.shows_thinking)
        self._finish: str | None = None
        self._stopped: str | None = None
        self._num_calls = 0

    def push(self, data: bytes) -> bytes:
        events = super().push(data)
        try:
            return self._translated(events)
        except _NOT_CHAT:
            self.ended = False  # the client does not have what came before the end
            raise

    def finish(self) -> bytes:
        return self._translated(super().finish())

    def whole(self, data: bytes) -> bytes:
        part = _DECODER.decode(super().whole(data))
        writer = self._begin(part)
        for choice in part.choices[:1]:
            self._add(choice, choice.message or _AnswerPart(), is_whole=True)
        self._end(writer)
        return msgspec.json.encode(writer.message)

    def _translated(self, events: bytes) -> bytes:
        shown: list[bytes] = []
        for data in _DATA.findall(events):
            if data == _DONE:
                if self._writer is not None:
                    shown += self._end(self._writer)
                continue
            part = _DECODER.decode(data)
            if part.error is not None:
                shown.append(message_error_event(message_error(_BROKEN, part.error)))
                continue
            if self._writer is None:
                shown += self._begin(part).start()
            for choice in part.choices[:1]:
                shown += self._add(choice, choice.delta or _AnswerPart())
        return b"".join(shown)

    def _begin(self, part: _ChatPart) -> MessageWriter:
        usage = MessageUsage.of(self._prompt_tokens, 0, 0)  # an estimate: the worker reports it at the end
        message = MessageObject(id=f"msg_{part.id}", model=part.model or self._model, usage=usage)
        self._writer = MessageWriter(message)
        return self._writer

    def _add(self, choice: _ChoicePart, part: _AnswerPart, is_whole: bool = False) -> list[bytes]:
        writer, events = self._writer, []
        assert writer is not None
        reasoning = part.reasoning_content or part.reasoning
        if reasoning and self._shows_thinking:
            events += writer.thinking(reasoning)
        if part.content:
            events += writer.text(part.content)
        for number, call in enumerate(part.tool_calls or ()):
            index, function = number if is_whole else call.index, call.function or _FunctionPart()
            if index >= self._num_calls:
                self._num_calls = index + 1
                events += writer.call(index, call.id or f"toolu_{index}", function.name or "")
            if function.arguments:
                events += writer.arguments(index, function.arguments)
        self._finish = choice.finish_reason or self._finish
        if isinstance(choice.stop_reason, str):
            self._stopped = choice.stop_reason
        return events

    def _end(self, writer: MessageWriter) -> list[bytes]:
        found = self.usage
        usage = writer.message.usage
        if found is not None:
            usage = MessageUsage.of(found.prompt_tokens, found.cached_tokens, found.completion_tokens)
        else:
            usage.output_tokens = self.num_pieces
        return writer.finish(self._stop_reason(), self._stopped, usage)

    def _stop_reason(self) -> StopReason:
        if self._finish == "length":
            return "max_tokens"
        if self._stopped is not None:
            return "stop_sequence"
        return "tool_use" if self._num_calls else "end_turn"
