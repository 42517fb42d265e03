"""Runs the sequences of one request: token chunks in, pieces of text, reasoning and tool calls out.

A `Choice` is one sequence with its detokenizer, stop strings and parsers. When `generate` is left, by an error too, every
sequence that still runs is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from stoker.base.errors import DeadlineExceeded, InvalidRequest
from stoker.kv.blocks.transfer import KvTicket
from stoker.sched.request import Finish, GenerateRequest, TokenChunk, TokenLogprobs, TokenUsage
from stoker.text.detokenizer import Detokenizer
from stoker.text.parsers.contract import ReasoningDelta, TextDelta, ToolCallStart
from stoker.text.stops import StopStrings
from stoker.worker.draft_metrics import output_kind
from stoker.worker.errors import error_of
from stoker.worker.output import AnswerDelta, OutputParser
from stoker.worker.record import RequestRecord

_ENGINE_FIRST_S = 0.25  # after a deadline, the engine has this long to end the request before the server does
_REPLAYED_AT_A_TIME = 128  # tokens to replay before the event loop runs other requests


class ChunkRelay(Protocol):
    async def relay(self, take: Callable[[TokenChunk], bool]) -> None:
        """Pass chunks to `take` as they arrive, until it returns False or has the last one. Raises what `take` raises."""


class ChunkSource(Protocol):
    """The part of `EngineService` that is needed here."""

    def open(self, request: GenerateRequest) -> AbstractAsyncContextManager[ChunkRelay]: ...

    def release(self, lease_id: str) -> None: ...


@dataclass(slots=True)
class AnswerPiece:
    """What one chunk adds to one choice. One is made for every token, so unused fields share empty defaults."""

    index: int
    token_ids: list[int]
    deltas: Sequence[AnswerDelta] = ()
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens that became content
    token_logprobs: Sequence[TokenLogprobs] = ()  # of all token_ids, if the client asked for logprobs
    finish: Literal["stop", "length"] | None = None
    handed_off: bool = False  # the last piece of this worker: another worker continues the choice
    replayed: bool = False  # sent before by another worker: the client of a stream has it already


class PieceSink(Protocol):
    """Builds an answer from pieces."""

    def take(self, piece: AnswerPiece) -> bool:
        """Accept one piece. False: await `wait_for_room` before the next one."""

    async def wait_for_room(self) -> None: ...


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence: passes its tokens, in order, through detokenizer, stop strings and parsers.

    The output depends only on the tokens so far, not on how they were split into chunks. So another worker can replay the
    tokens that a client has seen, and continue.
    """

    index: int
    request: GenerateRequest
    detokenizer: Detokenizer
    stops: StopStrings
    parser: OutputParser
    counts_prompt: bool = True  # the first choice of its prompt: the usage counts a prompt once
    keep_stop_token: bool = False
    grammar_param: str | None = None
    resumed_logprobs: list[TokenLogprobs] | None = None  # of the tokens that another worker generated
    ended: bool = (
        False  # nothing is left to generate; for a resumed choice this may become known only during the replay
    )
    continues_elsewhere: bool = False  # after a hand-off, another worker continues; else a hand-off ends the choice
    ran: bool = False  # the engine has reported how much of the prompt was cached
    ticket: KvTicket | None = None  # for its KV, if the engine kept it
    handed_off: bool = False  # another worker continues it
    usage: TokenUsage = field(init=False)
    reasoning_tokens: int = 0
    has_called: bool = False  # has called a tool, in the replay or since
    hides_reasoning: bool = False  # the client does not want to see it
    _held_tokens: int = 0  # tokens that are not part of a delta yet
    _held_logprobs: list[tuple[str, TokenLogprobs]] = field(default_factory=list)  # with the text of each token

    def __post_init__(self) -> None:
        num_prompt = self.request.num_prompt
        self.usage = TokenUsage(num_prompt, 0, len(self.request.token_ids) - num_prompt)

    @property
    def num_resumed(self) -> int:
        return len(self.request.token_ids) - self.request.num_prompt

    @property
    def is_resumed(self) -> bool:
        return self.ended or self.num_resumed > 0

    def replay(self) -> Iterator[AnswerPiece]:
        """Yield a piece for each token that another worker sampled.

        If the choice has ended with these tokens, also yield its end. It is marked as replayed if it was sent before, too.
        """
        sent_end = self.ended
        sampled = self.request.token_ids[self.request.num_prompt :]
        last_stops = bool(sampled) and sampled[-1] in self.request.sampling.stop_token_ids
        num_text = len(sampled) - int(last_stops and not self.keep_stop_token)
        piece = AnswerPiece(self.index, [], replayed=True)
        for i, token_id in enumerate(sampled):
            if i:
                yield piece
                piece = AnswerPiece(self.index, [], replayed=True)
            piece.token_ids.append(token_id)
            if i < num_text:
                self._take(token_id, self.resumed_logprobs[i] if self.resumed_logprobs else None, piece)
            if self.stops.stopped:
                break
        is_full = len(sampled) >= self.request.max_new_tokens
        self.ended = sent_end or bool(self.stops.stopped) or last_stops or is_full
        if not sent_end and sampled:
            yield piece
            piece = AnswerPiece(self.index, [])
        if self.ended:
            piece.finish = "length" if is_full and not (self.stops.stopped or last_stops) else "stop"
            self._flush(piece)
            yield piece

    def push(self, chunk: TokenChunk) -> AnswerPiece:
        if chunk.finish is not None and (error := error_of(chunk.finish)) is not None:
            if isinstance(error, InvalidRequest) and error.code == "invalid_grammar":
                error.param = self.grammar_param
            raise error
        token_ids, logprobs = chunk.token_ids, chunk.logprobs or ()
        piece = AnswerPiece(self.index, token_ids, (), (), logprobs)
        if chunk.usage is not None:
            self.ran = True
            self.usage.cached_tokens, self.usage.pulled_tokens = chunk.usage.cached_tokens, chunk.usage.pulled_tokens
            self.usage.draft_tokens = chunk.usage.draft_tokens
            self.usage.accepted_draft_tokens = chunk.usage.accepted_draft_tokens
        num_text = len(token_ids) if chunk.finish is None else len(token_ids) - self._stop_tokens(chunk.finish)
        for i, token_id in enumerate(token_ids):
            if i < num_text:
                self._take(token_id, logprobs[i] if logprobs else None, piece)
            if self.stops.stopped:
                piece.token_ids, piece.token_logprobs = token_ids[: i + 1], logprobs[: i + 1]
                piece.finish = "stop"
                break
        else:
            if chunk.finish is not None:
                piece.handed_off = self.continues_elsewhere and chunk.finish.reason == "handoff"
                if not piece.handed_off:
                    piece.finish = "stop" if chunk.finish.reason == "stop" else "length"
        self.usage.completion_tokens += len(piece.token_ids)
        if piece.handed_off or not self.continues_elsewhere:
            self.ticket = chunk.ticket
        self.handed_off = piece.handed_off
        if piece.finish is not None:
            self._flush(piece)
        return piece

    def _stop_tokens(self, finish: Finish) -> int:
        return int(finish.stop_token_id is not None and not self.keep_stop_token)

    def _take(self, token_id: int, logprobs: TokenLogprobs | None, piece: AnswerPiece) -> None:
        spelled = self.detokenizer.push(token_id)
        self._held_tokens += 1
        if logprobs is not None:
            self._held_logprobs.append((spelled, logprobs))
        if text := self.stops.push(spelled):
            self._settle(self.parser.push(text), piece)

    def _settle(self, deltas: Sequence[AnswerDelta], piece: AnswerPiece) -> None:
        """Add deltas to the piece. Tokens that were held back count with the deltas that they became part of."""
        if not deltas:
            return
        is_reasoning = True
        for delta in deltas:
            if not isinstance(delta, ReasoningDelta):
                is_reasoning = False
                self.has_called = self.has_called or isinstance(delta, ToolCallStart)
        if is_reasoning:
            self.reasoning_tokens += self._held_tokens
        if self.hides_reasoning:
            deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
        piece.deltas = [*piece.deltas, *deltas] if piece.deltas else deltas
        self._held_tokens = 0
        if self._held_logprobs:
            content = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
            piece.logprobs = [*piece.logprobs, *self._released(content)]

    def _released(self, content: str) -> list[TokenLogprobs]:
        """Return the held entries whose tokens are in `content`.

        Entries before it belong to markers and are dropped. Entries after it stay held.
        """
        held, self._held_logprobs = self._held_logprobs, []
        if not content:
            return []
        text = "".join(spelled for spelled, _ in held)
        start = 0 if text.startswith(content) else text.rfind(content)
        if start < 0:  # it starts with the rest of a token that was released before
            return [entry for _, entry in held]
        end, at, released = start + len(content), 0, []
        for spelled, entry in held:
            if at >= end:
                self._held_logprobs.append((spelled, entry))
            elif at + len(spelled) > start or at == start:  # a part of a character has no text: its position decides
                released.append(entry)
            at += len(spelled)
        return released

    def _flush(self, piece: AnswerPiece) -> None:
        text = "" if self.stops.stopped else self.stops.push(self.detokenizer.flush())
        text += self.stops.flush()
        self._settle([*(self.parser.push(text) if text else ()), *self.parser.flush()], piece)


async def generate(source: ChunkSource, choices: Sequence[Choice], record: RequestRecord, sink: PieceSink) -> None:
    """Run all choices and pass their pieces to `sink`. The pieces of a choice come in order; its last piece has `finish`."""
    try:
        running = []
        for choice in choices:
            for number, piece in enumerate(choice.replay()):
                if not sink.take(piece):
                    await sink.wait_for_room()
                if number % _REPLAYED_AT_A_TIME == _REPLAYED_AT_A_TIME - 1:
                    await asyncio.sleep(0)
            if not choice.ended:
                running.append(choice)
        if len(running) == 1:
            await _run(source, running[0], record, sink)
        else:
            await run_together([_run(source, choice, record, sink) for choice in running])
    finally:
        for choice in choices:
            kind = output_kind(choice.has_called, choice.request.sampling.grammar)
            record.count_tokens(choice.usage, choice.num_resumed, choice.counts_prompt and choice.ran, kind)


async def _run(source: ChunkSource, choice: Choice, record: RequestRecord, sink: PieceSink) -> None:
    ended = False

    def take(chunk: TokenChunk) -> bool:
        """Handle one chunk. The reader of the engine's pipe calls this directly, so that no task is woken per token."""
        nonlocal ended
        piece = choice.push(chunk)
        if chunk.ticket is not None and choice.ticket is None:
            source.release(chunk.ticket.lease_id)  # a stop string in the first token ended the answer here
        if piece.handed_off and not piece.token_ids:  # it adds nothing, so the client must see no event
            ended = True
            return False
        record.saw_chunk(piece.index)
        ended = piece.finish is not None or piece.handed_off
        return sink.take(piece) and not ended

    async with source.open(choice.request) as chunks:
        while True:
            await _in_time(chunks.relay(take), choice.request.deadline_s)
            if ended:
                return
            await sink.wait_for_room()


async def _in_time(relay: Awaitable[None], deadline_s: float | None) -> None:
    """Await `relay` until the deadline.

    The engine checks the deadline only between the steps of a running sequence. A request whose grammar is still being
    compiled, or whose step hangs, is ended here.
    """
    if deadline_s is None:
        return await relay
    try:
        async with asyncio.timeout(deadline_s + _ENGINE_FIRST_S - time.monotonic()):
            await relay
    except TimeoutError:
        raise DeadlineExceeded("The deadline of the request passed before its answer was complete.") from None


async def run_together(runs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all until they are done. An error in one of them cancels the others."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
