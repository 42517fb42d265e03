"""Moving running requests to other workers, and the duty of a worker: its role, and whether it takes requests.

A gateway names each request that it sends to a worker in the header `MOVE_HEADER`. To move some of them, it posts these names to
`MOVE_PATH`. The worker ends each with a hand-off note (`resume_notes.py`), and the gateway continues it on another worker. An
answer that is not streamed is then replaced by an event stream that has only notes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from stoker.proto.messages import WorkerRole

MAX_MOVED = 4096  # names in one request
MAX_NAME_CHARS = 160

MoveName = Annotated[str, Meta(pattern=rf"^[\x21-\x7e]{{1,{MAX_NAME_CHARS}}}\Z")]


class MoveRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks a worker to hand off these requests. It ignores names that it does not know: their requests have ended."""

    names: Annotated[list[MoveName], Meta(max_length=MAX_MOVED)]


class DutyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gives a worker another role, or lets it begin or end a drain. A field that is left out changes nothing."""

    role: WorkerRole | None = None
    draining: bool | None = None
    moving: bool = False  # with `draining`: gateways continue its running requests on other workers


class WorkerDuty(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to `DutyRequest`."""

    role: WorkerRole
    draining: bool
    moving: bool


def encode_move_request(names: list[str]) -> bytes:
    return msgspec.json.encode(MoveRequest(names=names))


def encode_duty_request(duty: DutyRequest) -> bytes:
    return msgspec.json.encode(duty)
