"""A request body while it is received: its bytes, its limits, and its part of the body budget."""

from __future__ import annotations

from stoker.gateway.http.body_budget import BodyBudget
from stoker.gateway.http.chunked import ChunkedReader
from stoker.gateway.http.errors import BadMessage
from stoker.gateway.http.gate import BodyGrant
from stoker.gateway.http.head import CHUNKED

_MAX_PIECES = 256
_SLICE_BYTES = 16 << 10  # of chunked input that is parsed in one go
_TURN_FRAMING_BYTES = (
    4 << 10
)  # chunk framing parsed in one turn of the event loop: about 800 chunks, or half a millisecond
_FREE_FRAMING_BYTES = 8 << 10  # chunk framing that any body may have; beyond it, framing may be half of the payload
_STEP_BYTES = 64 << 10  # a body takes its part of the budget in these steps, as it arrives

TOO_MANY_BYTES = "the gateway holds too many bytes of request bodies, of this client or of all; retry later"


class RequestBody:
    """Collects one body. `feed()` raises BadMessage if the body is invalid or exceeds a limit.

    After `feed()`, `done` says that the body is complete, and `rest` holds the bytes behind it. If `tired` is set instead,
    the caller must let the event loop run before it calls `go_on()`: many tiny chunks cost far more time than their bytes.
    """

    __slots__ = (
        "_budget",
        "_framing_bytes",
        "_left",
        "_max_bytes",
        "_pieces",
        "_reader",
        "_received",
        "_turn_framing_bytes",
        "_unparsed",
        "account",
        "done",
        "num_held",
        "rest",
        "tired",
    )

    def __init__(self, length: int, grant: BodyGrant, account: str, budget: BodyBudget) -> None:
        self.account = account
        self.num_held = 0
        self.done = self.tired = False
        self.rest = b""
        self._budget = budget
        self._max_bytes = grant.max_body_bytes
        self._pieces: list[bytes | bytearray] = []
        self._received = self._framing_bytes = self._turn_framing_bytes = 0
        self._unparsed = b""
        self._reader = ChunkedReader() if length == CHUNKED else None
        self._left = max(length, 0)
        if self._left > self._max_bytes:
            raise BadMessage(413, f"the request body has {length} bytes; at most {self._max_bytes} are allowed here")
        if not budget.fits(account, self._left):
            raise BadMessage(503, TOO_MANY_BYTES)

    def feed(self, data: bytes) -> None:
        if self._reader is not None:
            self._feed_chunks(self._reader, self._unparsed + data if self._unparsed else data)
            return
        left = self._left
        if len(data) > left:
            self.rest = data[left:]
            data = data[:left]
        self._left = left - len(data)
        self._received += len(data)
        self._hold_received(self._received + self._left)
        self._keep(data)
        self.done = self._left == 0

    def go_on(self) -> None:
        """Continue after `tired`, in a later turn of the event loop."""
        self._turn_framing_bytes = 0
        self.tired = False
        self.feed(b"")

    def joined(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def give_back(self) -> None:
        """Return the body's part of the budget, if the body is dropped."""
        if self.num_held:
            self._budget.give_back(self.account, self.num_held)
            self.num_held = 0

    def _feed_chunks(self, reader: ChunkedReader, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end and not reader.done:
            if self._turn_framing_bytes > _TURN_FRAMING_BYTES:
                self.tired = True
                break
            piece = data[at : at + _SLICE_BYTES] if end > _SLICE_BYTES else data
            at += len(piece)
            payload = reader.feed(piece)
            self._account_for(len(payload), len(piece) - len(payload) - len(reader.rest))
            if payload:
                self._keep(payload)
        self._unparsed = data[at:]
        if reader.done:
            self.rest = reader.rest + self._unparsed
            self.done = True

    def _account_for(self, num_payload: int, num_framing: int) -> None:
        self._received += num_payload
        self._framing_bytes += num_framing
        self._turn_framing_bytes += num_framing
        if self._received > self._max_bytes:
            raise BadMessage(413, f"the request body has more than {self._max_bytes} bytes, the largest allowed here")
        if self._framing_bytes > _FREE_FRAMING_BYTES + self._received // 2:
            raise BadMessage(
                400,
                f"{self._framing_bytes} bytes of chunk framing for {self._received} bytes of body;"
                " send larger chunks, of at least 16 bytes on average",
            )
        self._hold_received(self._max_bytes)

    def _hold_received(self, max_bytes: int) -> None:
        """Take as much of the budget as has arrived, and a little more. The body will have at most `max_bytes`."""
        if self._received > self.num_held:
            num_bytes = min(max_bytes, self._received + _STEP_BYTES) - self.num_held
            if not self._budget.take(self.account, num_bytes):
                raise BadMessage(503, TOO_MANY_BYTES)
            self.num_held += num_bytes

    def _keep(self, data: bytes) -> None:
        pieces = self._pieces
        if len(pieces) < _MAX_PIECES:
            pieces.append(data)
        else:
            # Many tiny pieces would take far more memory than their bytes, so append to one growing buffer from here on.
            last = pieces[-1]
            if isinstance(last, bytearray):
                last += data
            else:
                pieces[-1] = bytearray(last + data)
