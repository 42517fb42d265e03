"""What lets another worker continue an answer: a journal of its tokens beside a stream's events, and such a journal taken up.

The journal is lines of SSE comments, written only where a gateway asks for them (`x-stoker-stream: 1`), each in front of
the event that its tokens made, in the same write. It knows tokens; it refuses to know what an endpoint makes of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import web

from stoker.base.errors import InvalidRequest
from stoker.proto.openai import GenerationFields, KvTransfer, KvTransfers, LoggedToken
from stoker.sched.request import TokenLogprobs
from stoker.worker.errors import Problem
from stoker.worker.generate import Choice, Piece
from stoker.worker.logprobs import finite
from stoker.worker.sampling import ModelLimits, check_token_ids

HEADER = "x-stoker-stream"


# ---- taking up


@dataclass(frozen=True, slots=True)
class Resumed:
    """One choice's tokens so far."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finished: bool = False


_NOTHING = Resumed([], None)


def created_of(fields: GenerationFields) -> int:
    return int(time.time()) if fields.resume is None else fields.resume.created


def resumed_choices(
    fields: GenerationFields, num_choices: int, num_logprobs: int | None, limits: ModelLimits
) -> list[Resumed]:
    """One for each choice; empty ones where the answer begins here."""
    if fields.resume is None:
        return [_NOTHING] * num_choices
    given = fields.resume.choices
    if len(given) != num_choices:
        raise InvalidRequest(
            f"Invalid 'resume.choices': {len(given)} were given, but the answer has {num_choices}.",
            param="resume.choices",
        )
    resumed = []
    for i, choice in enumerate(given):
        param = f"resume.choices[{i}].token_ids"
        logged = [token for token in choice.token_ids if not isinstance(token, int)]
        ids = [token if isinstance(token, int) else token.token_id for token in choice.token_ids]
        if num_logprobs is not None and len(logged) != len(ids):
            raise InvalidRequest(
                f"Invalid '{param}': with logprobs each token is [id, logprob, top ids, top logprobs].", param=param
            )
        logprobs = None if num_logprobs is None else [_logprobs(token) for token in logged]
        resumed.append(Resumed(check_token_ids(ids, param, limits), logprobs, choice.finished))
    return resumed


def _logprobs(token: LoggedToken) -> TokenLogprobs:
    if len(token.top_ids) != len(token.top_logprobs):
        raise InvalidRequest(
            f"Invalid 'resume.choices': token {token.token_id} has {len(token.top_ids)} top ids, but "
            f"{len(token.top_logprobs)} top logprobs.",
            param="resume.choices",
        )
    return TokenLogprobs(token.token_id, token.logprob, token.top_ids, token.top_logprobs)


# ---- the journal


class Journal(Protocol):
    def lines(self, piece: Piece) -> bytes:
        """To stand in front of the events that `piece` makes, or alone, with a blank line after it, where it makes none."""

    def end(self) -> bytes:
        """To stand in front of what comes after all choices."""

    def handed_off(self, transfer: KvTransfer | KvTransfers) -> bytes:
        """To stand alone, instead of an end."""

    def failed(self, problem: Problem) -> bytes:
        """To stand in front of an error."""


class NoJournal:
    def lines(self, piece: Piece) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def handed_off(self, transfer: KvTransfer | KvTransfers) -> bytes:
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

    def handed_off(self, transfer: KvTransfer | KvTransfers) -> bytes:
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
