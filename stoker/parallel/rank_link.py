"""The socket between rank 0 and another rank: the rank's arguments, its state, and what it computed in each step.

Each rank tells what it received and what it sampled as digests, so that rank 0 can name a rank that diverges.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from stoker.base.errors import StokerError

_HEAD = struct.Struct("<BxxxIqq")  # kind, bytes of text, step, digest
_MAX_TEXT = 1 << 20


class LinkEnd(StokerError):
    """The other end of a link is gone."""

    code = "rank_link_ended"


class Kind(IntEnum):
    ARGUMENTS = 1  # to the rank: JSON
    HELLO = 2  # the rank has imported everything, and can connect
    READY = 3  # the rank waits for plans
    BEAT = 4
    RECEIVED = 5  # a plan: digest of its bytes
    SAMPLED = 6  # digest of the sampled tokens of a step
    FAILED = 7  # an error that ends the rank: text
    START = 8  # to the rank: rank 0 is ready too
    LOADED = 9  # step: the load; digest: its loaded blocks; text: the other results
    COPIED = 10  # step: the KV set; digest: how many offered blocks were copied since the start
    CLOSED = 11  # text: a lease that no peer reads any more
    WRITTEN = 12  # what waited for the tiers is written


@dataclass(frozen=True, slots=True)
class LinkMessage:
    kind: Kind
    step: int = 0
    digest: int = 0
    text: str = ""


class RankLink:
    """One end of the socket. Several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: LinkMessage) -> None:
        text = message.text.encode()[:_MAX_TEXT]
        data = _HEAD.pack(message.kind, len(text), message.step, message.digest) + text
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise LinkEnd(f"the other rank is gone ({error.strerror})") from error

    def send_arguments(self, arguments: dict[str, Any]) -> None:
        self.send(LinkMessage(Kind.ARGUMENTS, text=json.dumps(arguments)))

    def receive(self) -> LinkMessage:
        """Wait for a message. Raises LinkEnd if the other end is gone."""
        kind, num_text, step, digest = _HEAD.unpack(self._read(_HEAD.size))
        if num_text > _MAX_TEXT:
            raise LinkEnd(f"a message with {num_text:,} bytes of text")
        return LinkMessage(Kind(kind), step, digest, self._read(num_text).decode(errors="replace"))

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(count - len(data))
            except OSError as error:
                raise LinkEnd(f"the other rank is gone ({error.strerror})") from error
            if not part:
                raise LinkEnd("the other rank has ended")
            data += part
        return bytes(data)
