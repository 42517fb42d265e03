"""`/v1/chat/completions`: from its request to choices, and from their pieces to a chat completion or its chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from stoker.base.errors import InvalidRequest
from stoker.proto.handoff import KvTransferParams
from stoker.proto.internal_http import CHAT_PATH
from stoker.proto.openai.answers import UsageReport
from stoker.proto.openai.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinish,
    ChatMessage,
    ChatRequest,
    ToolCallDelta,
)
from stoker.proto.openai.chunk_template import ChunkTemplate
from stoker.proto.openai.errors import HttpError
from stoker.proto.openai.tools import ToolCall
from stoker.proto.sse import encode_event
from stoker.sched.request import TokenLogprobs
from stoker.text.conversation import chat_conversation
from stoker.text.parsers.contract import ReasoningDelta, TextDelta
from stoker.text.tools import ToolPlan, chat_tools
from stoker.worker.chat_calls import ChatCalls, add_delta
from stoker.worker.choices import GenerationOptions, usage_report
from stoker.worker.constraint import resolve_constraint
from stoker.worker.conversations import PreparedConversation, prepare_conversation
from stoker.worker.endpoint import AnswerSetup, GeneratingEndpoint
from stoker.worker.generate import AnswerPiece, Choice
from stoker.worker.handoff import transfer_params
from stoker.worker.logprobs import chat_logprobs
from stoker.worker.prediction import predicted_tokens
from stoker.worker.stream import SseStream


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    setup: AnswerSetup
    body: ChatRequest
    tools: ToolPlan
    prepared: PreparedConversation
    id: str

    @property
    def choices(self) -> list[Choice]:
        return self.prepared.choices

    @property
    def has_functions(self) -> bool:
        """Return True if the request has `functions`, the older form of `tools`. Then the answer has the older form too."""
        return self.body.functions is not None

    @property
    def prompt_token_ids(self) -> list[int] | UnsetType:
        return self.prepared.prompt.token_ids if self.body.return_token_ids else UNSET

    def collector(self) -> ChatCollector:
        return ChatCollector(self)

    def events(self, stream: SseStream) -> ChatEvents:
        return ChatEvents(self, stream)

    def closing_events(self, transfer: KvTransferParams | UnsetType) -> bytes:
        if not self.body.wants_usage and transfer is UNSET:
            return b""
        usage = usage_report(self.choices) if self.body.wants_usage else UNSET
        return encode_event(msgspec.json.encode(self.chunk(usage, transfer=transfer)))

    def error_event(self, error: HttpError) -> bytes:
        return error.event()

    def finish_reason(self, index: int, reason: ChatFinish) -> ChatFinish:
        """Follow OpenAI: a call to a function that the client named ends with "stop", any other with "tool_calls"."""
        called = self.choices[index].has_called and self.tools.mode != "named"
        if reason != "stop" or not called:
            return reason
        return "function_call" if self.has_functions else "tool_calls"

    def chunk(
        self,
        usage: UsageReport | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        transfer: KvTransferParams | UnsetType = UNSET,
    ) -> ChatChunk:
        """Return a chunk without choices."""
        return ChatChunk(
            id=self.id,
            created=self.setup.created,
            model=self.setup.model,
            system_fingerprint=self.setup.fingerprint,
            choices=[],
            usage=usage,
            prompt_token_ids=prompt_token_ids,
            kv_transfer_params=transfer,
        )


async def prepare_chat(setup: AnswerSetup, body: ChatRequest) -> ChatAnswer:
    _refuse_unsupported(body)
    tools = chat_tools(body, setup.context.config.max_tools)
    has_new_name = body.max_completion_tokens is not None
    options = GenerationOptions(
        prompt_param="messages",
        n=body.n or 1,
        max_tokens=body.max_completion_tokens if has_new_name else body.max_tokens,
        max_tokens_param="max_completion_tokens" if has_new_name else "max_tokens",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=resolve_constraint(body, body.response_format),
        continues_text=bool(body.continue_final_message),
        prediction=await predicted_tokens(
            setup.context, body.prediction, body.max_completion_tokens or body.max_tokens
        ),
        hides_reasoning=body.hides_reasoning,
    )
    prepared = await prepare_conversation(
        setup,
        body,
        options,
        tools,
        lambda constrained: chat_conversation(body, tools, constrained),
        split_reasoning=body.separate_reasoning is not False,
    )
    return ChatAnswer(setup, body, tools, prepared, prepared.ids.make("chatcmpl-"))


CHAT = GeneratingEndpoint(CHAT_PATH, ChatRequest, prepare_chat)


def _refuse_unsupported(body: ChatRequest) -> None:
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest(
            "Invalid value for 'modalities': only ['text'] is supported, this model generates only text.",
            param="modalities",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")


# ---- the whole answer


@dataclass(slots=True, eq=False)
class _CollectedChoice:
    """The joined pieces of one choice."""

    writer: ChatCalls
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: ChatFinish = "stop"

    def add(self, piece: AnswerPiece) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        for delta in piece.deltas:
            match delta:
                case TextDelta():
                    self.content.append(delta.text)
                case ReasoningDelta():
                    self.reasoning.append(delta.text)
        for call in self.writer.push(piece.deltas, piece.finish is not None):
            add_delta(self.calls, call)


class ChatCollector:
    """Builds a chat completion from the pieces."""

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self._collected = [_CollectedChoice(ChatCalls(answer.tools.custom)) for _ in answer.choices]

    def take(self, piece: AnswerPiece) -> bool:
        collected = self._collected[piece.index]
        collected.add(piece)
        if piece.finish is not None:
            collected.finish = self._answer.finish_reason(piece.index, piece.finish)
        return True

    async def wait_for_room(self) -> None: ...

    def result(self) -> ChatCompletion:
        answer = self._answer
        return ChatCompletion(
            id=answer.id,
            created=answer.setup.created,
            model=answer.setup.model,
            choices=[self._choice(i, collected) for i, collected in enumerate(self._collected)],
            usage=usage_report(answer.choices),
            system_fingerprint=answer.setup.fingerprint,
            prompt_token_ids=answer.prompt_token_ids,
            kv_transfer_params=transfer_params(answer.choices),
        )

    def _choice(self, index: int, collected: _CollectedChoice) -> ChatChoice:
        body, has_functions = self._answer.body, self._answer.has_functions
        content, reasoning = "".join(collected.content), "".join(collected.reasoning) or UNSET
        token_bytes = self._answer.setup.context.text.tokenizer.token_bytes
        return ChatChoice(
            index=index,
            message=ChatMessage(
                content=content if content or not collected.calls else None,
                reasoning_content=reasoning,
                reasoning=reasoning,
                tool_calls=UNSET if has_functions else collected.calls or UNSET,
                function_call=collected.calls[0].function if has_functions and collected.calls else UNSET,
            ),
            logprobs=chat_logprobs(collected.logprobs, token_bytes) if body.logprobs else None,
            finish_reason=collected.finish,
            token_ids=collected.token_ids if body.return_token_ids else UNSET,
        )


# ---- the stream


class ChatEvents:
    """Sends each piece as at most one event, so that the tokens of a stream say exactly which events the client has."""

    def __init__(self, answer: ChatAnswer, stream: SseStream) -> None:
        self._answer = answer
        self._stream = stream
        self._started = {choice.index for choice in answer.choices if choice.is_resumed}
        usage = None if answer.body.wants_usage else UNSET
        self._first = ChunkTemplate(answer.chunk(usage, prompt_token_ids=answer.prompt_token_ids))
        self._later = ChunkTemplate(answer.chunk(usage))
        self._with_ids = bool(answer.body.return_token_ids)
        self._token_bytes = answer.setup.context.text.tokenizer.token_bytes
        self._calls = {choice.index: ChatCalls(answer.tools.custom) for choice in answer.choices}
        self.wait_for_room = stream.wait_for_room

    def take(self, piece: AnswerPiece) -> bool:
        calls = self._calls[piece.index].push(piece.deltas, piece.finish is not None)
        if piece.replayed:
            return True
        template = self._later if self._started else self._first
        opens = piece.index not in self._started
        if opens:
            self._started.add(piece.index)
        event = b""
        if opens or piece.deltas or piece.finish is not None or piece.logprobs or self._with_ids:
            event = template.event(self._choice(piece, calls, opens))
        return self._stream.send(piece, event)

    def _choice(self, piece: AnswerPiece, calls: list[ToolCallDelta], opens: bool) -> ChatChunkChoice:
        delta = _delta(piece, calls)
        if self._answer.has_functions and not isinstance(delta.tool_calls, UnsetType):
            delta.function_call, delta.tool_calls = delta.tool_calls[0].function, UNSET
        if opens:
            delta.role, delta.content = "assistant", delta.content or ""
        return ChatChunkChoice(
            index=piece.index,
            delta=delta,
            logprobs=chat_logprobs(piece.logprobs, self._token_bytes) if piece.logprobs else None,
            finish_reason=piece.finish and self._answer.finish_reason(piece.index, piece.finish),
            token_ids=piece.token_ids if self._with_ids else UNSET,
        )


def _delta(piece: AnswerPiece, calls: list[ToolCallDelta]) -> ChatDelta:
    content, reasoning = "", ""
    for delta in piece.deltas:
        match delta:
            case TextDelta():
                content += delta.text
            case ReasoningDelta():
                reasoning += delta.text
    return ChatDelta(
        content=content or UNSET,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
