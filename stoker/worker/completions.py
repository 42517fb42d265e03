"""`/v1/completions`: prompts as text or token ids, each answered `n` times; choices are numbered prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UNSET

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.answers import UsageReport
from stoker.proto.openai.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from stoker.proto.openai.decode import decode
from stoker.proto.openai.envelope import Envelope
from stoker.proto.openai.handoff import KvTransferParams
from stoker.proto.sse import encode_event
from stoker.sched.request import TokenLogprobs
from stoker.text.conversation import completion_prompts
from stoker.text.parsers.contract import TextDelta
from stoker.worker.constraint import resolve_constraint
from stoker.worker.context import CONTEXT, WorkerContext, read_body
from stoker.worker.generate import Choice, Piece, generate
from stoker.worker.handoff import transfer_params
from stoker.worker.ids import AnswerIds
from stoker.worker.journal import open_journal, wants_journal
from stoker.worker.logprobs import TextOffsets, completion_logprobs
from stoker.worker.output import NoTools
from stoker.worker.prompt import Asked, Prompt, encode, make_choices, usage_report
from stoker.worker.record import RECORD, RequestRecord
from stoker.worker.resume import created_of
from stoker.worker.sampling import check_token_ids
from stoker.worker.stream import SseStream, open_stream


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """One request on its way: what every chunk and the whole answer repeat."""

    context: WorkerContext
    body: CompletionRequest
    id: str
    model: str
    created: int
    fingerprint: str
    prompts: list[Prompt]
    choices: list[Choice]

    @property
    def include_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // (len(self.choices) // len(self.prompts))]

    def echoed(self, index: int) -> str:
        return (self.prompt_of(index).text or "") if self.body.echo else ""


async def completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = decode(CompletionRequest, await read_body(request, context.config))
    goes_on = wants_journal(request, body)
    answer = await prepare_completion(context, body, request[RECORD].request_id, goes_on=goes_on)
    if body.stream:
        return await _stream(request, answer)
    whole = await _whole(answer, request[RECORD])
    return web.Response(body=msgspec.json.encode(whole), content_type="application/json")


async def prepare_completion(
    context: WorkerContext, body: CompletionRequest, request_id: str, *, goes_on: bool = False
) -> CompletionAnswer:
    """`goes_on`: if its KV is to be kept, another worker is to end what this one begins."""
    model = context.served_model(body.model)
    n = body.n or 1
    if body.suffix:
        raise InvalidRequest("Unsupported parameter: 'suffix'.", param="suffix", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(f"'best_of' must be 'n' ({n}): all choices are returned.", param="best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("'logprobs' of an echoed prompt are not available.", param="echo")
    prompts = await _prompts(context, body)
    if len(prompts) * n > context.config.max_choices:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={n} are {len(prompts) * n} choices, more than the "
            f"{context.config.max_choices} allowed.",
            param="n" if n > 1 else "prompt",
        )
    asked = Asked(
        prompt_param="prompt" if body.prompt_token_ids is None else "prompt_token_ids",
        n=n,
        max_tokens=body.max_tokens,
        num_logprobs=body.logprobs,
        constraint=resolve_constraint(body, body.response_format),
        num_prompts=len(prompts),
        continues_text=True,
        goes_on=goes_on,
    )
    choices: list[Choice] = []
    for prompt in prompts:
        choices += make_choices(context, body, asked, prompt, lambda _: NoTools(), first_index=len(choices))
    created = created_of(body)
    answer_id = AnswerIds.of(request_id, created, prompts[0].token_ids).make("cmpl-")
    return CompletionAnswer(context, body, answer_id, model, created, context.fingerprint, prompts, choices)


async def _prompts(context: WorkerContext, body: CompletionRequest) -> list[Prompt]:
    given = completion_prompts(body)
    tokenizer, limits = context.text.tokenizer, context.limits

    def encode_all() -> list[Prompt]:
        prompts = []
        for param, prompt in given:
            if isinstance(prompt, str):
                prompts.append(
                    Prompt(encode(context.text, prompt, context.limits, param, add_special_tokens=True), prompt)
                )
            else:
                ids = check_token_ids(prompt, param, limits)
                prompts.append(Prompt(ids, tokenizer.decode(ids) if body.echo else None))
        return prompts

    return await context.off_loop(sum(len(prompt) for _, prompt in given), encode_all)


def _text(piece: Piece) -> str:
    text = ""
    for delta in piece.deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
    return text


class _Whole:
    """The choices, joined from their pieces."""

    def __init__(self, answer: CompletionAnswer) -> None:
        self.texts = [answer.echoed(choice.index) for choice in answer.choices]
        self.results = [
            CompletionChoice(index=choice.index, text="", finish_reason="stop") for choice in answer.choices
        ]
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in answer.choices]
        self.offsets = [TextOffsets(choice.detokenizer) for choice in answer.choices]
        self.token_ids: list[list[int]] = [[] for _ in answer.choices]

    def take(self, piece: Piece) -> bool:
        self.texts[piece.index] += _text(piece)
        self.logprobs[piece.index] += piece.logprobs
        self.token_ids[piece.index] += piece.token_ids
        self.results[piece.index].finish_reason = piece.finish
        return True

    async def room(self) -> None: ...


async def _whole(answer: CompletionAnswer, record: RequestRecord) -> Completion:
    got = _Whole(answer)
    await generate(answer.context.service, answer.choices, record, got)
    for i, result in enumerate(got.results):
        result.text = got.texts[i]
        result.logprobs = _logprobs(answer, got.logprobs[i], got.offsets[i])
        if answer.body.return_token_ids:
            result.token_ids = got.token_ids[i]
            result.prompt_token_ids = answer.prompt_of(i).token_ids
    return _completion(answer, got.results, usage_report(answer.choices), transfer_params(answer.choices))


class _Events:
    """Each piece as an event, at once."""

    def __init__(self, answer: CompletionAnswer, stream: SseStream) -> None:
        self._answer = answer
        self._stream = stream
        self._envelope = Envelope(_completion(answer, [], None if answer.include_usage else UNSET))
        self._offsets = [TextOffsets(choice.detokenizer) for choice in answer.choices]
        self._started = {choice.index for choice in answer.choices if choice.is_resumed}
        self._with_ids = bool(answer.body.return_token_ids)
        self.room = stream.room

    def take(self, piece: Piece) -> bool:
        i = piece.index
        result = CompletionChoice(index=i, text=_text(piece), finish_reason=piece.finish)
        if piece.logprobs:
            result.logprobs = _logprobs(self._answer, piece.logprobs, self._offsets[i])
        if piece.replayed:
            return True
        if self._with_ids:
            result.token_ids = piece.token_ids
        if i not in self._started:
            self._started.add(i)
            result.text = self._answer.echoed(i) + result.text
            if self._with_ids:
                result.prompt_token_ids = self._answer.prompt_of(i).token_ids
        is_event = result.text or piece.finish or self._with_ids or result.logprobs
        return self._stream.send(piece, self._envelope.event(result) if is_event else b"")


async def _stream(request: web.Request, answer: CompletionAnswer) -> web.StreamResponse:
    journal = open_journal(request, answer.choices, answer.created)
    stream = open_stream(request, answer.context.config.client_stall_s, journal)
    await generate(answer.context.service, answer.choices, request[RECORD], _Events(answer, stream))
    transfer = transfer_params(answer.choices)
    if transfer is not UNSET and answer.choices[0].goes_on:
        return await stream.hand_off(transfer)
    last = b""
    if answer.include_usage or transfer is not UNSET:
        total = usage_report(answer.choices) if answer.include_usage else UNSET
        last = encode_event(msgspec.json.encode(_completion(answer, [], total, transfer)))
    return await stream.done(last)


def _completion(
    answer: CompletionAnswer,
    choices: list[CompletionChoice],
    usage: UsageReport | msgspec.UnsetType | None,
    transfer: KvTransferParams | msgspec.UnsetType = UNSET,
) -> Completion:
    return Completion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        system_fingerprint=answer.fingerprint,
        choices=choices,
        usage=usage,
        kv_transfer_params=transfer,
    )


def _logprobs(
    answer: CompletionAnswer, entries: Sequence[TokenLogprobs], offsets: TextOffsets
) -> CompletionLogprobs | None:
    if answer.body.logprobs is None:
        return None
    return completion_logprobs(entries, answer.body.logprobs, offsets, answer.context.text.tokenizer.token_bytes)
