"""`/v1/chat/completions`: a body becomes choices, their pieces become OpenAI's chat completion or its chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from msgspec import UNSET

from stoker.base.errors import InvalidRequest
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
    FunctionDelta,
    ToolCallDelta,
)
from stoker.proto.openai.decode import decode
from stoker.proto.openai.envelope import Envelope
from stoker.proto.openai.handoff import KvTransferParams
from stoker.proto.openai.tools import FunctionCall, ToolCall
from stoker.proto.sse import encode_event
from stoker.sched.request import TokenLogprobs
from stoker.text.conversation import chat_conversation, num_chars
from stoker.text.parsers.contract import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from stoker.text.tools import ToolPlan, chat_tools
from stoker.worker.constraint import resolve_constraint
from stoker.worker.context import CONTEXT, WorkerContext, read_body
from stoker.worker.generate import Choice, Piece, generate
from stoker.worker.handoff import transfer_params
from stoker.worker.ids import AnswerIds
from stoker.worker.journal import open_journal, wants_journal
from stoker.worker.logprobs import chat_logprobs
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
from stoker.worker.record import RECORD, RequestRecord
from stoker.worker.resume import created_of
from stoker.worker.sampling import check_token_ids
from stoker.worker.stream import SseStream, open_stream


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One chat request on its way: what every chunk and the whole answer repeat."""

    context: WorkerContext
    body: ChatRequest
    id: str
    model: str
    created: int
    fingerprint: str
    prompt: Prompt
    tools: ToolPlan
    choices: list[Choice]

    @property
    def include_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    @property
    def prompt_token_ids(self) -> list[int] | msgspec.UnsetType:
        return self.prompt.token_ids if self.body.return_token_ids else UNSET


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = decode(ChatRequest, await read_body(request, context.config))
    answer = await prepare_chat(context, body, request[RECORD].request_id, goes_on=wants_journal(request, body))
    if body.stream:
        return await _stream(request, answer)
    completion = await _whole(answer, request[RECORD])
    return web.Response(body=msgspec.json.encode(completion), content_type="application/json")


async def prepare_chat(
    context: WorkerContext, body: ChatRequest, request_id: str, *, goes_on: bool = False
) -> ChatAnswer:
    """`goes_on`: if its KV is to be kept, another worker is to end what this one begins."""
    model = context.served_model(body.model)
    _refuse_unsupported(body)
    tools = chat_tools(body, context.config.max_tools)
    constraint = forced_constraint(context.text, resolve_constraint(body, body.response_format), tools)
    prompt = await _prompt(context, body, tools, constrained=constraint is not None)
    split = body.separate_reasoning is not False
    created = created_of(body)
    ids = AnswerIds.of(request_id, created, prompt.token_ids)

    def new_parser(choice: int) -> OutputParser:
        constrained, call_id = constraint is not None, call_ids(ids, choice)
        return chat_parser(context.text, prompt, tools, constrained=constrained, split=split, call_id=call_id)

    choices = make_choices(
        context,
        body,
        Asked(
            prompt_param="messages" if body.prompt_token_ids is None else "prompt_token_ids",
            n=body.n or 1,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            max_tokens_param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            constraint=constraint,
            continues_text=bool(body.continue_final_message),
            goes_on=goes_on,
        ),
        prompt,
        new_parser,
        keep_special_tokens=needs_special_tokens(context.text, tools),
    )
    answer_id = ids.make("chatcmpl-")
    return ChatAnswer(context, body, answer_id, model, created, context.fingerprint, prompt, tools, choices)


def _refuse_unsupported(body: ChatRequest) -> None:
    for name, instead in (
        ("audio", "this model gives text alone"),
        ("web_search_options", "this server searches nothing"),
        ("functions", "use 'tools' instead"),
        ("function_call", "use 'tool_choice' instead"),
    ):
        if getattr(body, name) is not None:
            raise InvalidRequest(
                f"Unsupported parameter: '{name}': {instead}.", param=name, code="unsupported_parameter"
            )
    if body.include_reasoning is False:
        raise InvalidRequest(
            "Unsupported value: 'include_reasoning': what was thought is always returned.", param="include_reasoning"
        )
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest("Invalid value for 'modalities': this model gives text alone.", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")


async def _prompt(context: WorkerContext, body: ChatRequest, tools: ToolPlan, constrained: bool) -> Prompt:
    if body.prompt_token_ids is not None:
        return Prompt(check_token_ids(body.prompt_token_ids, "prompt_token_ids", context.limits))
    conversation = chat_conversation(body, tools, constrained)
    return await context.off_loop(num_chars(conversation), lambda: render(context.text, conversation, context.limits))


# ---- the whole answer


@dataclass(slots=True, eq=False)
class _Gathered:
    """One choice's pieces, joined."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: ChatFinish = "stop"

    def add(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        for delta in piece.deltas:
            match delta:
                case TextDelta():
                    self.content.append(delta.text)
                case ReasoningDelta():
                    self.reasoning.append(delta.text)
                case ToolCallStart():
                    self.calls.append(ToolCall(id=delta.call_id, function=FunctionCall(name=delta.name)))
                case ToolArgumentsDelta():
                    self.calls[delta.index].function.arguments += delta.text


class _Whole:
    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self.gathered = [_Gathered() for _ in answer.choices]

    def take(self, piece: Piece) -> bool:
        self.gathered[piece.index].add(piece)
        if piece.finish is not None:
            self.gathered[piece.index].finish = _finish(self._answer, piece.index, piece.finish)
        return True

    async def room(self) -> None: ...


async def _whole(answer: ChatAnswer, record: RequestRecord) -> ChatCompletion:
    whole = _Whole(answer)
    await generate(answer.context.service, answer.choices, record, whole)
    return ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=[_choice(answer, i, got) for i, got in enumerate(whole.gathered)],
        usage=usage_report(answer.choices),
        system_fingerprint=answer.fingerprint,
        prompt_token_ids=answer.prompt_token_ids,
        kv_transfer_params=transfer_params(answer.choices),
    )


def _choice(answer: ChatAnswer, index: int, got: _Gathered) -> ChatChoice:
    content, reasoning = "".join(got.content), "".join(got.reasoning) or UNSET
    token_bytes = answer.context.text.tokenizer.token_bytes
    return ChatChoice(
        index=index,
        message=ChatMessage(
            content=content if content or not got.calls else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=got.calls or UNSET,
        ),
        logprobs=chat_logprobs(got.logprobs, token_bytes) if answer.body.logprobs else None,
        finish_reason=got.finish,
        token_ids=got.token_ids if answer.body.return_token_ids else UNSET,
    )


def _finish(answer: ChatAnswer, index: int, reason: ChatFinish) -> ChatFinish:
    """As OpenAI: a call that the client named itself ends with "stop", one that the model chose with "tool_calls"."""
    called = answer.choices[index].has_called and answer.tools.mode != "named"
    return "tool_calls" if reason == "stop" and called else reason


# ---- the stream


class _Events:
    """A piece makes one event at most: what a client has got can be told in tokens, whichever event was the last."""

    def __init__(self, answer: ChatAnswer, stream: SseStream) -> None:
        self._answer = answer
        self._stream = stream
        self._started = {choice.index for choice in answer.choices if choice.is_resumed}
        usage = None if answer.include_usage else UNSET
        self._first = Envelope(_chunk(answer, usage, prompt_token_ids=answer.prompt_token_ids))
        self._later = Envelope(_chunk(answer, usage))
        self._with_ids = bool(answer.body.return_token_ids)
        self.room = stream.room

    def take(self, piece: Piece) -> bool:
        if piece.replayed:
            return True
        envelope = self._later if self._started else self._first
        opens = piece.index not in self._started
        if opens:
            self._started.add(piece.index)
        event = b""
        if opens or piece.deltas or piece.finish is not None or piece.logprobs or self._with_ids:
            finish = piece.finish and _finish(self._answer, piece.index, piece.finish)
            event = envelope.event(_chunk_choice(self._answer, piece, finish, opens))
        return self._stream.send(piece, event)


async def _stream(request: web.Request, answer: ChatAnswer) -> web.StreamResponse:
    journal = open_journal(request, answer.choices, answer.created)
    stream = open_stream(request, answer.context.config.client_stall_s, journal)
    await generate(answer.context.service, answer.choices, request[RECORD], _Events(answer, stream))
    transfer = transfer_params(answer.choices)
    if transfer is not UNSET and answer.choices[0].goes_on:
        return await stream.hand_off(transfer)
    last = b""
    if answer.include_usage or transfer is not UNSET:
        usage = usage_report(answer.choices) if answer.include_usage else UNSET
        last = encode_event(msgspec.json.encode(_chunk(answer, usage, transfer=transfer)))
    return await stream.done(last)


def _chunk_choice(answer: ChatAnswer, piece: Piece, finish: ChatFinish | None, opens: bool) -> ChatChunkChoice:
    token_bytes = answer.context.text.tokenizer.token_bytes
    delta = _delta(piece)
    if opens:
        delta.role, delta.content = "assistant", delta.content or ""
    return ChatChunkChoice(
        index=piece.index,
        delta=delta,
        logprobs=chat_logprobs(piece.logprobs, token_bytes) if piece.logprobs else None,
        finish_reason=finish,
        token_ids=piece.token_ids if answer.body.return_token_ids else UNSET,
    )


def _delta(piece: Piece) -> ChatDelta:
    content, reasoning = "", ""
    calls: list[ToolCallDelta] = []
    for delta in piece.deltas:
        match delta:
            case TextDelta():
                content += delta.text
            case ReasoningDelta():
                reasoning += delta.text
            case ToolCallStart():
                function = FunctionDelta(name=delta.name, arguments="")
                calls.append(ToolCallDelta(index=delta.index, id=delta.call_id, type="function", function=function))
            case ToolArgumentsDelta():
                if calls and calls[-1].index == delta.index:  # some clients look at a chunk's first entry alone
                    calls[-1].function.arguments += delta.text
                    continue
                calls.append(ToolCallDelta(index=delta.index, function=FunctionDelta(arguments=delta.text)))
    return ChatDelta(
        content=content or UNSET,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _chunk(
    answer: ChatAnswer,
    usage: UsageReport | msgspec.UnsetType | None,
    prompt_token_ids: list[int] | msgspec.UnsetType = UNSET,
    transfer: KvTransferParams | msgspec.UnsetType = UNSET,
) -> ChatChunk:
    return ChatChunk(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        system_fingerprint=answer.fingerprint,
        choices=[],
        usage=usage,
        prompt_token_ids=prompt_token_ids,
        kv_transfer_params=transfer,
    )
