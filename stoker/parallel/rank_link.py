"""The connection between rank 0 and another rank: the rank's arguments, its state, and what it computed in each step.

Each rank tells what it received and what it sampled as digests, so that rank 0 can name a rank that diverges. A rank on another
machine gets its plans over the same connection.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from stoker.base.errors import StokerError
from stoker.parallel.channel import Channel, ChannelEnd

_HEAD = struct.Struct("<Bxxxxxxxqq")  # kind, step, digest; a text or a plan follows
_MAX_TEXT = 1 << 20

WAITS_FOR_RANKS = -1  # in a heartbeat: the rank is not loading


class LinkEnd(StokerError):
    """The other end of a link is gone."""

    code = "rank_link_ended"


class RankDismissed(StokerError):
    """Rank 0 has ended this rank. The message is its reason."""

    code = "rank_dismissed"


class EngineStopped(RankDismissed):
    """The engine was stopped, and will not start again."""

    code = "engine_stopped"


class Kind(IntEnum):
    ARGUMENTS = 1  # to the rank: JSON
    HELLO = 2  # the rank has imported everything, and can connect
    READY = 3  # the rank waits for plans
    BEAT = 4  # step: how far the rank's start is
    RECEIVED = 5  # a plan: digest of its bytes
    SAMPLED = 6  # digest of the sampled tokens of a step
    FAILED = 7  # an error that ends the rank: text
    START = 8  # to the rank: rank 0 is ready too
    MEET = 9  # to the rank: all ranks have arrived; JSON: where they connect to each other
    PLAN = 10  # to a rank on another machine: a frame
    BYE = 11  # to a rank on another machine: the engine has been stopped, and will not start again
    LOADED = 12  # step: the load; digest: its loaded blocks; text: the other results
    COPIED = 13  # step: the KV set; digest: how many offered blocks were copied since the start
    CLOSED = 14  # text: a lease that no peer reads any more
    WRITTEN = 15  # what waited for the tiers is written


@dataclass(frozen=True, slots=True)
class LinkMessage:
    kind: Kind
    step: int = 0
    digest: int = 0
    text: str = ""
    frame: bytes = b""  # of a PLAN

    def table(self, kind: Kind) -> dict[str, Any]:
        """Return the JSON table of a message of this kind. Raises LinkEnd if it is none."""
        try:
            table = json.loads(self.text)
        except (ValueError, RecursionError):
            table = None
        if self.kind is not kind or not isinstance(table, dict):
            raise LinkEnd(f"expected {kind.name}, got {self.kind.name}")
        return table


class RankLink:
    """One end of the connection. Several threads may send."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, message: LinkMessage) -> None:
        body = message.frame or message.text.encode()[:_MAX_TEXT]
        try:
            self._channel.send(_HEAD.pack(message.kind, message.step, message.digest) + body)
        except ChannelEnd as error:
            raise LinkEnd(error.message) from error

    def send_json(self, kind: Kind, table: dict[str, Any]) -> None:
        self.send(LinkMessage(kind, text=json.dumps(table)))

    def receive(self) -> LinkMessage:
        """Wait for a message. Raises LinkEnd if the other end is gone."""
        try:
            data = self._channel.receive()
            number, step, digest = _HEAD.unpack_from(data)
            kind = Kind(number)
        except ChannelEnd as error:
            raise LinkEnd(error.message) from error
        except (struct.error, ValueError) as error:
            raise LinkEnd(f"a message that cannot be read ({error})") from error
        body = data[_HEAD.size :]
        if kind is Kind.PLAN:
            return LinkMessage(kind, step, digest, frame=body)
        return LinkMessage(kind, step, digest, body[:_MAX_TEXT].decode(errors="replace"))

    def receive_order(self) -> LinkMessage:
        """Wait for a message of rank 0. Raises RankDismissed if it ends this rank."""
        message = self.receive()
        if message.kind is Kind.FAILED:
            raise RankDismissed(message.text)
        if message.kind is Kind.BYE:
            raise EngineStopped("the engine was stopped")
        return message

    def close(self) -> None:
        self._channel.close()
