"""Writes resume notes into a stream, when the gateway asks for them. `proto/resume_notes.py` has the format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from stoker.proto.handoff import KvTransferParams
from stoker.proto.internal_http import NOTES_HEADER, NOTES_WANTED
from stoker.proto.openai.errors import HttpError
from stoker.proto.openai.fields import GenerationFields
from stoker.proto.resume_notes import (
    END_NOTE,
    error_note,
    finish_note,
    handoff_note,
    logprobs_note,
    token_note,
    usage_note,
)
from stoker.worker.generate import AnswerPiece, Choice


class NoteWriter(Protocol):
    """Returns the notes about a part of a stream, as comment lines. Notes without an event are followed by a blank line."""

    def of_piece(self, piece: AnswerPiece) -> bytes:
        """Return the notes for the events of `piece`."""

    def of_end(self) -> bytes:
        """Return the note in front of what follows all choices."""

    def of_handoff(self, transfer: KvTransferParams) -> bytes:
        """Return the note that replaces the end of the stream."""

    def of_error(self, error: HttpError) -> bytes:
        """Return the note in front of an error event."""


class NoNotes:
    """Writes nothing, for clients that are not our gateway."""

    def of_piece(self, piece: AnswerPiece) -> bytes:
        return b""

    def of_end(self) -> bytes:
        return b""

    def of_handoff(self, transfer: KvTransferParams) -> bytes:
        return b""

    def of_error(self, error: HttpError) -> bytes:
        return b""


class StreamNotes:
    """Writes the notes of one stream."""

    def __init__(self, choices: Sequence[Choice], created: int) -> None:
        self._choices = choices
        self._created = created
        self._last_usage = (-1, -1)  # prompt tokens and cached tokens, as last written
        self._unseen = {choice.index for choice in choices if choice.counts_prompt}

    def of_piece(self, piece: AnswerPiece) -> bytes:
        if piece.replayed:
            return b""
        index = piece.index
        usage = b""
        if self._last_usage[0] < 0 or index in self._unseen:
            self._unseen.discard(index)
            usage = self._usage()
        tokens = b""
        if piece.token_logprobs:
            tokens = logprobs_note(index, piece.token_logprobs)
        elif piece.token_ids:
            tokens = token_note(index, piece.token_ids)
        return usage + tokens + (finish_note(index) if piece.finish is not None else b"")

    def of_end(self) -> bytes:
        return END_NOTE

    def of_handoff(self, transfer: KvTransferParams) -> bytes:
        # In mid-prompt no token has reported the usage. A prompt that did not run is counted by the next worker.
        usage = self._usage() if all(choice.ran for choice in self._choices if choice.counts_prompt) else b""
        return usage + handoff_note(transfer)

    def of_error(self, error: HttpError) -> bytes:
        return error_note(error.status, error.error.code or error.error.type)

    def _usage(self) -> bytes:
        """Return the usage note if it has changed: the first token of a later prompt may add cached tokens."""
        firsts = [choice.usage for choice in self._choices if choice.counts_prompt]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        cached = sum(min(usage.cached_tokens, usage.prompt_tokens) for usage in firsts)
        if (prompt, cached) == self._last_usage:
            return b""
        self._last_usage = (prompt, cached)
        return usage_note(prompt, cached, self._created, self._choices[0].request.sampling.seed)


def wants_notes(request: web.Request, fields: GenerationFields) -> bool:
    return bool(fields.stream) and request.headers.get(NOTES_HEADER) == NOTES_WANTED


def open_notes(enabled: bool, choices: Sequence[Choice], created: int) -> NoteWriter:
    return StreamNotes(choices, created) if enabled else NoNotes()
