"""Resume notes in the stream of a Stoker worker. Any split gives the same events, notes and resume field."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec

from stoker.base.errors import StokerError
from stoker.gateway.path.resume import StokerStream, TokenMemory
from stoker.proto.resume_notes import Resume, finish_note, token_note, usage_note
from tests.fuzz.target import FuzzTarget, pieces

_WELL_FORMED = re.compile(rb"(?:(?::[^\n]*\n)*(?:event: [^\n]*\n)?data: [^\n]*\n\n)*")


def _pushed(parts: list[bytes], counts_events: bool) -> Any:
    memory = TokenMemory()
    stream = StokerStream(memory, counts_events=counts_events)
    try:
        out = b"".join(stream.push(part) for part in parts)
        usage = memory.usage
        field = memory.resume_field(2) if memory.notes and usage is not None else b""
    except (StokerError, ValueError):  # a broken stream, which ends this worker's part
        return "broken"
    # Empty lines between events mean nothing.
    events = [event.strip(b"\n") for event in out.split(b"\n\n") if event.strip(b"\n")]
    return events, usage, memory.num_tokens, field, stream.failure, memory.take_ticket()


def execute(data: bytes, rng: random.Random) -> None:
    counts_events = rng.random() < 0.5
    whole = _pushed([data], counts_events)
    split = _pushed(pieces(data, rng), counts_events)
    # Only streams as workers write them: notes in front of events. An error note ends the stream, and what follows it in the
    # same write is dropped.
    if b":x " not in data and _WELL_FORMED.fullmatch(data):
        assert split == whole, (split, whole)
    if whole != "broken" and whole[3]:
        try:
            msgspec.json.decode(whole[3], type=Resume)
        except msgspec.ValidationError:
            return  # the next worker refuses it: one clean error


def seeds() -> list[bytes]:
    event = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":3}}\n\n'
    first = usage_note(10, 4, 1700000000, 7) + token_note(0, [1, 2]) + event
    return [
        first + token_note(1, [5]) + event + finish_note(0) + event + b":e\ndata: [DONE]\n\n",
        first + b":x 503 engine_died\n" + event,
        first + b':k {"transfer_mode":"stoker"}\n\n',
        b":t 0 [5,-0.5,[1],[-0.5]]\n" + event,
    ]


TARGET = FuzzTarget(
    execute,
    seeds,
    max_input_bytes=8 << 10,
    tokens=[
        b":u 1 2 3 4\n",
        b":t 0 5\n",
        b":f 1\n",
        b":t 9 5\n",
        b":e\n",
        b":x 500 bad\n",
        b":k {}\n",
        b"\n\n",
        b"\n:",
        b" ",
    ],
)
