"""Streams of background responses that a gateway has begun, read back from the store so that they can be continued."""

from __future__ import annotations

import re

from stoker.gateway.objects import response_table as table
from stoker.gateway.store.store import Transaction
from stoker.proto.resume_notes import BadNotes, BegunStream, ResumeNotes

# Events before the first token. A second run of the request has the same ones.
_FIRST_EVENTS = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
_TYPE = re.compile(rb"^event: ?([a-z0-9_.]+)\s*$", re.MULTILINE)


def stored_stream(reader: Transaction, response_id: str) -> BegunStream | None:
    """Return what is stored of a stream, or None if it cannot be continued.

    The notes say which tokens the stored events were made of, so that a worker continues exactly after them. The workers of
    other engines write no notes: their streams can only begin again, before the first token.
    """
    number = table.last_number(reader, response_id)
    if number < 0:
        return BegunStream()
    try:
        notes = ResumeNotes.restored(table.notes_of(reader, response_id))
        if notes:
            notes.check(1)
    except BadNotes:
        return None
    if not notes and any(
        kind not in _FIRST_EVENTS
        for _, events in table.events_after(reader, response_id, -1)
        for kind in _TYPE.findall(events)
    ):
        return None
    return BegunStream(notes, number + 1, notes.num_tokens)
