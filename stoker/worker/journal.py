"""What lets another worker continue an answer: a journal of its tokens beside a stream's events.

It is lines of SSE comments, written only where a gateway asks for them (`x-stoker-stream: 1`), each in front of the event
that its tokens made, in the same write. It knows tokens; it refuses to know what an endpoint makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from stoker.proto.openai.fields import GenerationFields, LoggedToken
from stoker.proto.openai.handoff import KvTransferParams
from stoker.sched.request import TokenLogprobs
from stoker.worker.errors import Problem
from stoker.worker.generate import Choice, Piece
from stoker.worker.logprobs import finite

HEADER = "x-stoker-stream"


class Journal(Protocol):
    def lines(self, piece: Piece) -> bytes:
        """To stand in front of the events that `piece` makes, or alone, with a blank line after it, where it makes none."""

    def end(self) -> bytes:
        """To stand in front of what comes after all choices."""

    def handed_off(self, transfer: KvTransferParams) -> bytes:
        """To stand alone, instead of an end."""

    def failed(self, problem: Problem) -> bytes:
        """To stand in front of an error."""


class NoJournal:
    def lines(self, piece: Piece) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def handed_off(self, transfer: KvTransferParams) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        return b""


class StreamJournal:
    def __init__(self, choices: Sequence[Choice], created: int) -> None:
        self._choices = choices
        self._created = created
        self._said = (-1, -1)
        self._unseen = {choice.index for choice in choices if choice.counts_prompt}

    def lines(self, piece: Piece) -> bytes:
        if piece.replayed:
            return b""
        index = piece.index
        usage = b""
        if self._said[0] < 0 or index in self._unseen:
            self._unseen.discard(index)
            usage = self._usage()
        if piece.token_logprobs:
            tokens = b" ".join(map(_logged, piece.token_logprobs))
        else:
            tokens = " ".join(map(str, piece.token_ids)).encode()
        said = b":t %d %b\n" % (index, tokens) if tokens else b""
        return usage + said + (b":f %d\n" % index if piece.finish is not None else b"")

    def end(self) -> bytes:
        return b":e\n"

    def handed_off(self, transfer: KvTransferParams) -> bytes:
        return b":k %b\n" % msgspec.json.encode(transfer)

    def failed(self, problem: Problem) -> bytes:
        return f":x {problem.status} {problem.body.code or problem.body.type}\n".encode()

    def _usage(self) -> bytes:
        """Said again where a later prompt of the request brings more from the cache."""
        firsts = [choice.usage for choice in self._choices if choice.counts_prompt]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        cached = sum(min(usage.cached_tokens, usage.prompt_tokens) for usage in firsts)
        if (prompt, cached) == self._said:
            return b""
        self._said = (prompt, cached)
        return b":u %d %d %d %d\n" % (prompt, cached, self._created, self._choices[0].request.sampling.seed)


def _logged(entry: TokenLogprobs) -> bytes:
    """Without spaces: an item of the line, and as it stands an item of `resume`'s `token_ids`."""
    top = [finite(logprob) for logprob in entry.top_logprobs]
    return msgspec.json.encode(LoggedToken(entry.token_id, finite(entry.logprob), entry.top_ids, top))


def wants_journal(request: web.Request, fields: GenerationFields) -> bool:
    return bool(fields.stream) and request.headers.get(HEADER) == "1"


def open_journal(request: web.Request, choices: Sequence[Choice], created: int) -> Journal:
    wanted = request.headers.get(HEADER) == "1"
    return StreamJournal(choices, created) if wanted else NoJournal()
