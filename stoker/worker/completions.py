"""`/v1/completions`: prompts as text or token ids, with `n` choices each, numbered prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType

from stoker.base.errors import InvalidRequest
from stoker.proto.handoff import KvTransferParams
from stoker.proto.internal_http import COMPLETIONS_PATH
from stoker.proto.openai.answers import UsageReport
from stoker.proto.openai.chunk_template import ChunkTemplate
from stoker.proto.openai.completions import CompletionChoice, CompletionLogprobs, CompletionRequest, TextCompletion
from stoker.proto.openai.errors import HttpError
from stoker.proto.sse import encode_event
from stoker.sched.request import TokenLogprobs
from stoker.text.conversation import completion_prompts
from stoker.text.detokenizer import Detokenizer
from stoker.text.parsers.contract import TextDelta
from stoker.worker.choices import GenerationOptions, make_choices, usage_report
from stoker.worker.constraint import resolve_constraint
from stoker.worker.context import WorkerContext
from stoker.worker.endpoint import AnswerSetup, GeneratingEndpoint
from stoker.worker.generate import AnswerPiece, Choice
from stoker.worker.handoff import transfer_params
from stoker.worker.ids import AnswerIds
from stoker.worker.logprobs import TextOffsets, completion_logprobs, with_prompt
from stoker.worker.output import NoTools
from stoker.worker.prediction import predicted_tokens
from stoker.worker.prompt_logprobs import prompt_logprobs
from stoker.worker.prompts import TokenizedPrompt, encode, given_prompt, truncated
from stoker.worker.stream import SseStream


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    setup: AnswerSetup
    body: CompletionRequest
    prompts: list[TokenizedPrompt]
    choices: list[Choice]
    id: str
    # Of each prompt, if the client asked for `echo` with `logprobs`.
    prompt_logprobs: list[list[TokenLogprobs | None]] = field(default_factory=list)

    def collector(self) -> CompletionCollector:
        return CompletionCollector(self)

    def events(self, stream: SseStream) -> CompletionEvents:
        return CompletionEvents(self, stream)

    def closing_events(self, transfer: KvTransferParams | UnsetType) -> bytes:
        if not self.body.wants_usage and transfer is UNSET:
            return b""
        usage = usage_report(self.choices) if self.body.wants_usage else UNSET
        return encode_event(msgspec.json.encode(self.completion([], usage, transfer)))

    def error_event(self, error: HttpError) -> bytes:
        return error.event()

    def prompt_of(self, index: int) -> TokenizedPrompt:
        return self.prompts[self._prompt_index(index)]

    def echoed(self, index: int) -> str:
        """Return the text that the choice starts with if the client asked for `echo`."""
        return (self.prompt_of(index).text or "") if self.body.echo else ""

    def logprobs(self, entries: Sequence[TokenLogprobs], offsets: TextOffsets) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        return completion_logprobs(entries, self.body.logprobs, offsets, self.setup.context.text.tokenizer.token_bytes)

    @property
    def only_echoes(self) -> bool:
        """Return True if nothing is generated: `max_tokens` is 0."""
        return self.body.max_tokens == 0

    def offsets(self) -> list[TextOffsets]:
        """Return one per choice. The text of a choice begins with the prompt, if that is echoed."""
        return [TextOffsets(choice.detokenizer, len(self.echoed(choice.index))) for choice in self.choices]

    def with_prompt(self, index: int, answer: CompletionLogprobs | None) -> CompletionLogprobs | None:
        """Return the logprobs of a choice with those of its prompt in front, if the client asked for them."""
        if not self.prompt_logprobs:
            return answer
        text = self.setup.context.text.tokenizer
        prompt, logprobs = self.prompt_of(index), self.prompt_logprobs[self._prompt_index(index)]
        offsets = TextOffsets(Detokenizer(text))
        return with_prompt(logprobs, prompt.token_ids, answer, self.body.logprobs or 0, offsets, text.token_bytes)

    def _prompt_index(self, index: int) -> int:
        return index // (len(self.choices) // len(self.prompts))

    def completion(
        self,
        choices: list[CompletionChoice],
        usage: UsageReport | UnsetType | None,
        transfer: KvTransferParams | UnsetType = UNSET,
    ) -> TextCompletion:
        return TextCompletion(
            id=self.id,
            created=self.setup.created,
            model=self.setup.model,
            system_fingerprint=self.setup.fingerprint,
            choices=choices,
            usage=usage,
            kv_transfer_params=transfer,
        )


async def prepare_completion(setup: AnswerSetup, body: CompletionRequest) -> CompletionAnswer:
    n = body.n or 1
    echoes_only = bool(body.echo) and body.max_tokens == 0
    if body.suffix:
        raise InvalidRequest(
            "Unsupported parameter: 'suffix': this server does not insert text before a suffix.",
            param="suffix",
            code="unsupported_parameter",
        )
    if body.best_of and body.best_of != n:
        raise InvalidRequest(
            f"Invalid 'best_of': {body.best_of}. It must equal 'n' ({n}), because all choices are returned.",
            param="best_of",
        )
    prompts = await _prompts(setup.context, body)
    max_choices = setup.context.config.max_choices
    if len(prompts) * n > max_choices:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={n} are {len(prompts) * n} choices, more than the {max_choices} allowed.",
            param="n" if n > 1 else "prompt",
        )
    options = GenerationOptions(
        prompt_param="prompt" if body.prompt_token_ids is None else "prompt_token_ids",
        n=n,
        max_tokens=1 if echoes_only else body.max_tokens,
        num_logprobs=body.logprobs,
        constraint=resolve_constraint(body, body.response_format),
        num_prompts=len(prompts),
        continues_text=True,
        prediction=await predicted_tokens(setup.context, body.prediction, body.max_tokens),
    )
    choices: list[Choice] = []
    for prompt in prompts:
        choices += make_choices(setup, body, options, prompt, lambda _: NoTools(), first_index=len(choices))
    if echoes_only:
        for choice in choices:
            choice.request = replace(choice.request, max_new_tokens=0)
            choice.ended = True
    answer_id = AnswerIds.of(setup.request_id, setup.created, prompts[0].token_ids).make("cmpl-")
    scores = []
    if body.echo and body.logprobs is not None:
        firsts = [choice.request for choice in choices if choice.counts_prompt]
        scores = [await prompt_logprobs(setup.context.service, first, body.logprobs) for first in firsts]
    return CompletionAnswer(setup, body, prompts, choices, answer_id, scores)


COMPLETIONS = GeneratingEndpoint(COMPLETIONS_PATH, CompletionRequest, prepare_completion)


async def _prompts(context: WorkerContext, body: CompletionRequest) -> list[TokenizedPrompt]:
    given = completion_prompts(body)
    text, limits = context.text, context.limits

    def prompt_of(param: str, prompt: str | list[int]) -> TokenizedPrompt:
        if isinstance(prompt, str):
            ids = encode(text, prompt, limits, param, body.add_special_tokens is not False)
            tokenized = truncated(TokenizedPrompt(ids, prompt), body, body.max_tokens, limits)
        else:
            tokenized = truncated(given_prompt(context, prompt, param), body, body.max_tokens, limits)
        if not body.echo or tokenized.text is not None:
            return tokenized
        return TokenizedPrompt(tokenized.token_ids, text.tokenizer.decode(tokenized.token_ids))

    return await context.off_loop(
        sum(len(prompt) for _, prompt in given), lambda: [prompt_of(param, prompt) for param, prompt in given]
    )


def _text(piece: AnswerPiece) -> str:
    text = ""
    for delta in piece.deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
    return text


class CompletionCollector:
    """Builds a completion from the pieces."""

    def __init__(self, answer: CompletionAnswer) -> None:
        self._answer = answer
        self._texts = [answer.echoed(choice.index) for choice in answer.choices]
        self._results = [
            CompletionChoice(index=choice.index, text="", finish_reason="stop") for choice in answer.choices
        ]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in answer.choices]
        self._offsets = answer.offsets()
        self._token_ids: list[list[int]] = [[] for _ in answer.choices]

    def take(self, piece: AnswerPiece) -> bool:
        self._texts[piece.index] += _text(piece)
        self._logprobs[piece.index] += piece.logprobs
        self._token_ids[piece.index] += piece.token_ids
        self._results[piece.index].finish_reason = piece.finish
        return True

    async def wait_for_room(self) -> None: ...

    def result(self) -> TextCompletion:
        answer = self._answer
        for i, result in enumerate(self._results):
            result.text = self._texts[i]
            result.logprobs = answer.with_prompt(i, answer.logprobs(self._logprobs[i], self._offsets[i]))
            if answer.body.return_token_ids:
                result.token_ids = self._token_ids[i]
                result.prompt_token_ids = answer.prompt_of(i).token_ids
        return answer.completion(self._results, usage_report(answer.choices), transfer_params(answer.choices))


class CompletionEvents:
    """Sends each piece as an event."""

    def __init__(self, answer: CompletionAnswer, stream: SseStream) -> None:
        self._answer = answer
        self._stream = stream
        self._template = ChunkTemplate(answer.completion([], None if answer.body.wants_usage else UNSET))
        self._offsets = answer.offsets()
        self._started = set()
        if not answer.only_echoes:
            self._started = {choice.index for choice in answer.choices if choice.is_resumed}
        self._with_ids = bool(answer.body.return_token_ids)
        self.wait_for_room = stream.wait_for_room

    def take(self, piece: AnswerPiece) -> bool:
        i = piece.index
        result = CompletionChoice(index=i, text=_text(piece), finish_reason=piece.finish)
        if piece.logprobs:  # also of a replayed piece: the offsets of later tokens depend on it
            result.logprobs = self._answer.logprobs(piece.logprobs, self._offsets[i])
        if piece.replayed and not self._answer.only_echoes:
            return True
        if self._with_ids:
            result.token_ids = piece.token_ids
        if i not in self._started:
            self._started.add(i)
            result.text = self._answer.echoed(i) + result.text
            result.logprobs = self._answer.with_prompt(i, result.logprobs)
            if self._with_ids:
                result.prompt_token_ids = self._answer.prompt_of(i).token_ids
        is_event = result.text or piece.finish or self._with_ids or result.logprobs
        return self._stream.send(piece, self._template.event(result) if is_event else b"")
