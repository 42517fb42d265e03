"""Sequences of one request, run together: token chunks in, pieces of text, reasoning and tool calls out.

A `Choice` is one sequence with its text machinery. Leaving `generate` by any road cancels every sequence that still runs.
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
from stoker.worker.errors import error_of
from stoker.worker.output import AnswerDelta, OutputParser
from stoker.worker.record import RequestRecord

_ENGINE_FIRST_S = 0.25  # past its deadline a request is the engine's to end, and then ours
_REPLAYED_AT_A_TIME = 128  # tokens, before other streams have their turn


class Chunks(Protocol):
    async def relay(self, take: Callable[[TokenChunk], bool]) -> None:
        """Feeds chunks to `take` as they come, until it says no or has the last one. What it raises is raised here."""


class ChunkSource(Protocol):
    """What of EngineService is needed here."""

    def open(self, request: GenerateRequest) -> AbstractAsyncContextManager[Chunks]: ...

    def release(self, lease_id: str) -> None: ...


@dataclass(slots=True)
class Piece:
    """What one chunk brought to one choice. One is made for every token: what it lacks costs nothing."""

    index: int
    token_ids: list[int]
    deltas: Sequence[AnswerDelta] = ()
    logprobs: Sequence[TokenLogprobs] = ()  # of tokens that became content
    token_logprobs: Sequence[TokenLogprobs] = ()  # of all token_ids, where they were asked for
    finish: Literal["stop", "length"] | None = None
    handed_off: bool = False  # the last from here, but not the choice's: another worker goes on with it
    replayed: bool = False  # said before, by another worker: a stream's client has it already


class PieceSink(Protocol):
    """Whoever makes an answer of the pieces."""

    def take(self, piece: Piece) -> bool:
        """False: no more of them until `room` has returned."""

    async def room(self) -> None: ...


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence: its tokens, in order, through detokenizer, stop strings and parsers.

    What comes out depends on the tokens so far alone, not on how they were cut into chunks: that is what lets another
    worker replay the tokens that a client has seen, and go on.
    """

    index: int
    request: GenerateRequest
    detokenizer: Detokenizer
    stops: StopStrings
    parser: OutputParser
    counts_prompt: bool = True  # the first of its prompt's choices: a prompt is paid for once
    keep_stop_token: bool = False
    grammar_param: str | None = None
    resumed_logprobs: list[TokenLogprobs] | None = None  # of the request's tokens after its prompt
    ended: bool = False  # nothing is left to be generated: known before a replay, or by it
    goes_on: bool = False  # after a hand-off, elsewhere, from where it stands; else a hand-off is its end
    ran: bool = False  # the engine has said what of its prompt was in the cache
    ticket: KvTicket | None = None  # for its KV, if that was kept
    usage: TokenUsage = field(init=False)
    reasoning_tokens: int = 0
    has_called: bool = False  # a tool, in what was replayed or since
    _held_tokens: int = 0  # pushed, and no delta has come of them yet
    _held_logprobs: list[tuple[str, TokenLogprobs]] = field(default_factory=list)  # with their tokens' texts

    def __post_init__(self) -> None:
        num_prompt = self.request.num_prompt
        self.usage = TokenUsage(num_prompt, 0, len(self.request.token_ids) - num_prompt)

    @property
    def num_resumed(self) -> int:
        return len(self.request.token_ids) - self.request.num_prompt

    @property
    def is_resumed(self) -> bool:
        return self.ended or self.num_resumed > 0

    def replay(self) -> Iterator[Piece]:
        """What was sampled before (resume), a piece a token. If that was all, a last piece tells how it ended: a replayed
        one where that has been said, too."""
        said_end = self.ended
        sampled = self.request.token_ids[self.request.num_prompt :]
        last_stops = bool(sampled) and sampled[-1] in self.request.sampling.stop_token_ids
        num_text = len(sampled) - int(last_stops and not self.keep_stop_token)
        piece = Piece(self.index, [], replayed=True)
        for i, token_id in enumerate(sampled):
            if i:
                yield piece
                piece = Piece(self.index, [], replayed=True)
            piece.token_ids.append(token_id)
            if i < num_text:
                self._take(token_id, self.resumed_logprobs[i] if self.resumed_logprobs else None, piece)
            if self.stops.stopped:
                break
        is_full = len(sampled) >= self.request.max_new_tokens
        self.ended = said_end or bool(self.stops.stopped) or last_stops or is_full
        if not said_end and sampled:
            yield piece
            piece = Piece(self.index, [])
        if self.ended:
            piece.finish = "length" if is_full and not (self.stops.stopped or last_stops) else "stop"
            self._flush(piece)
            yield piece

    def push(self, chunk: TokenChunk) -> Piece:
        if chunk.finish is not None and (error := error_of(chunk.finish)) is not None:
            if isinstance(error, InvalidRequest) and error.code == "invalid_grammar":
                error.param = self.grammar_param
            raise error
        token_ids, logprobs = chunk.token_ids, chunk.logprobs or ()
        piece = Piece(self.index, token_ids, (), (), logprobs)
        if chunk.usage is not None:
            self.ran = True
            self.usage.cached_tokens, self.usage.pulled_tokens = chunk.usage.cached_tokens, chunk.usage.pulled_tokens
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
                piece.handed_off = self.goes_on and chunk.finish.reason == "handoff"
                assert chunk.ticket is not None or not piece.handed_off, "handed off, but nobody could go on"
                if not piece.handed_off:
                    piece.finish = "stop" if chunk.finish.reason == "stop" else "length"
        self.usage.completion_tokens += len(piece.token_ids)
        if piece.handed_off or not self.goes_on:
            self.ticket = chunk.ticket
        if piece.finish is not None:
            self._flush(piece)
        return piece

    def _stop_tokens(self, finish: Finish) -> int:
        return int(finish.stop_token_id is not None and not self.keep_stop_token)

    def _take(self, token_id: int, logprobs: TokenLogprobs | None, piece: Piece) -> None:
        spelled = self.detokenizer.push(token_id)
        self._held_tokens += 1
        if logprobs is not None:
            self._held_logprobs.append((spelled, logprobs))
        if text := self.stops.push(spelled):
            self._settle(self.parser.push(text), piece)

    def _settle(self, deltas: Sequence[AnswerDelta], piece: Piece) -> None:
        """Tokens that had shown nothing so far go with what they turned out to be a part of."""
        if not deltas:
            return
        piece.deltas = [*piece.deltas, *deltas] if piece.deltas else deltas
        is_reasoning = True
        for delta in deltas:
            if not isinstance(delta, ReasoningDelta):
                is_reasoning = False
                self.has_called = self.has_called or isinstance(delta, ToolCallStart)
        if is_reasoning:
            self.reasoning_tokens += self._held_tokens
        self._held_tokens = 0
        if self._held_logprobs:
            content = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
            piece.logprobs = [*piece.logprobs, *self._released(content)]

    def _released(self, content: str) -> list[TokenLogprobs]:
        """The held entries whose tokens are in `content`. Those before it were marks and go; those after it wait on."""
        held, self._held_logprobs = self._held_logprobs, []
        if not content:
            return []
        text = "".join(spelled for spelled, _ in held)
        start = 0 if text.startswith(content) else text.rfind(content)
        if start < 0:  # it begins with the rest of a token that was released before
            return [entry for _, entry in held]
        end, at, released = start + len(content), 0, []
        for spelled, entry in held:
            if at >= end:
                self._held_logprobs.append((spelled, entry))
            elif at + len(spelled) > start or at == start:  # a part of a character spells nothing: its place decides
                released.append(entry)
            at += len(spelled)
        return released

    def _flush(self, piece: Piece) -> None:
        text = "" if self.stops.stopped else self.stops.push(self.detokenizer.flush())
        text += self.stops.flush()
        self._settle([*(self.parser.push(text) if text else ()), *self.parser.flush()], piece)


async def generate(source: ChunkSource, choices: Sequence[Choice], record: RequestRecord, sink: PieceSink) -> None:
    """All choices' pieces into `sink` as they come, each choice's in order, the last with `finish`."""
    try:
        running = []
        for choice in choices:
            for number, piece in enumerate(choice.replay()):
                if not sink.take(piece):
                    await sink.room()
                if number % _REPLAYED_AT_A_TIME == _REPLAYED_AT_A_TIME - 1:
                    await asyncio.sleep(0)
            if not choice.ended:
                running.append(choice)
        if len(running) == 1:
            await _run(source, running[0], record, sink)
        else:
            await _together([_run(source, choice, record, sink) for choice in running])
    finally:
        for choice in choices:
            record.count_tokens(choice.usage, choice.num_resumed, with_prompt=choice.counts_prompt and choice.ran)


async def _run(source: ChunkSource, choice: Choice, record: RequestRecord, sink: PieceSink) -> None:
    ended = False

    def take(chunk: TokenChunk) -> bool:
        """Called by the reader of the engine's pipe: for each token this is all that is done, and nobody is woken."""
        nonlocal ended
        piece = choice.push(chunk)
        if chunk.ticket is not None and choice.ticket is None:
            source.release(chunk.ticket.lease_id)  # a stop string in the first token: nobody goes on from there
        record.saw_chunk(piece.index)
        ended = piece.finish is not None or piece.handed_off
        return sink.take(piece) and not ended

    async with source.open(choice.request) as chunks:
        while True:
            await _in_time(chunks.relay(take), choice.request.deadline_s)
            if ended:
                return
            await sink.room()


async def _in_time(relay: Awaitable[None], deadline_s: float | None) -> None:
    """The engine keeps the deadline of what it runs; here it holds too while a grammar is compiled, or a step hangs."""
    if deadline_s is None:
        return await relay
    try:
        async with asyncio.timeout(deadline_s + _ENGINE_FIRST_S - time.monotonic()):
            await relay
    except TimeoutError:
        raise DeadlineExceeded("The request's deadline passed before its answer was complete.") from None


async def _together(runs: Sequence[Coroutine[None, None, None]]) -> None:
    """What ends one of them ends all."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
