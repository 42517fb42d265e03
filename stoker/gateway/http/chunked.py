"""Strict decoder of the chunked transfer coding.

Lines end in CRLF, sizes are hex digits; extensions and trailers are bounded in size and dropped.
"""

from __future__ import annotations

import re

from stoker.gateway.http.errors import BadMessage

_HEX = b"0123456789abcdefABCDEF"
_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})(?:;[\t -~]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_MAX_LINE = 512  # bytes in a size line or in one trailer
_MAX_WASTE = 8 << 10  # bytes in all extensions and trailers of one body
# Bytes of size lines and line ends beyond those of the payload. Chunks of fewer than six bytes on average exceed it in the
# end: they cost far more time than their bytes are worth.
_MAX_OVERHEAD = 64 << 10


class ChunkedReader:
    """Incremental decoder: `feed()` returns the payload. After the last chunk `done` is set and `rest` holds later bytes."""

    __slots__ = ("_between", "_left", "_line", "_overhead", "_trailers", "_waste", "done", "rest")

    def __init__(self) -> None:
        self.done = False
        self.rest = b""
        self._between = True  # the next byte is the first byte of a chunk
        self._left = 0  # bytes left of the current chunk, including its CRLF
        self._line = b""  # an incomplete line
        self._trailers = False
        self._waste = 0
        self._overhead = 0  # bytes that are not payload minus bytes that are, in pieces that are not one whole chunk

    def feed(self, data: bytes) -> bytes:
        if not self._between:
            return self._feed(data)
        # Fast path: exactly one whole chunk, as senders usually write them.
        end = data.find(b"\r\n", 0, 17)
        digits = data[:end]
        if end > 0 and not digits.translate(None, _HEX):
            stop = end + 2 + int(digits, 16)
            if len(data) == stop + 2 and stop > end + 2 and data.endswith(b"\r\n"):
                return data[end + 2 : stop]
        return self._feed(data)

    def _feed(self, data: bytes) -> bytes:
        if self._line:
            data = self._line + data
            self._line = b""
        pieces: list[bytes] = []
        at = 0
        while at < len(data):
            if self._left:
                at = self._payload(data, at, pieces)
                continue
            # Take a whole chunk at once. The search limit keeps the size within the 15 digits that the slow path accepts.
            end = data.find(b"\r\n", at, at + 17)
            if end > at and not self._trailers and not (digits := data[at:end]).translate(None, _HEX):
                stop = end + 2 + int(digits, 16)
                if stop > end + 2 and data[stop : stop + 2] == b"\r\n":
                    pieces.append(data[end + 2 : stop])
                    at = stop + 2
                    continue
            end = data.find(b"\n", at, at + _MAX_LINE)
            if end < 0:
                if len(data) - at >= _MAX_LINE:
                    raise BadMessage(400, f"a chunk's size line is longer than {_MAX_LINE} bytes")
                self._line = data[at:]
                break
            if end == at or data[end - 1] != 13:
                raise BadMessage(400, "a chunk's line does not end in CRLF")
            self._read_line(data[at : end - 1])
            at = end + 1
            if self.done:
                self.rest = data[at:]
                break
        self._between = not (self._left or self._line or self._trailers)
        payload = b"".join(pieces)
        self._overhead += at - 2 * len(payload)
        if self._overhead > _MAX_OVERHEAD:
            raise BadMessage(400, "the chunks are too small: at most half of the bytes may be their size lines")
        return payload

    def _payload(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Consume the available bytes of the current chunk and return the position behind them."""
        here = len(data) - at
        payload = self._left - 2
        if payload > 0:
            piece = data[at : at + payload]
            pieces.append(piece)
            self._left -= len(piece)
            return at + len(piece)
        tail = b"\r\n"[2 - self._left :]
        take = min(self._left, here)
        if data[at : at + take] != tail[:take]:
            raise BadMessage(400, "a chunk's length differs from its size line")
        self._left -= take
        return at + take

    def _read_line(self, line: bytes) -> None:
        if self._trailers:
            if not line:
                self.done = True
                return
            if _TRAILER.fullmatch(line) is None:
                raise BadMessage(400, "a trailer is malformed")
            self._wasted(len(line))
            return
        size = _SIZE_LINE.fullmatch(line)
        if size is None:
            raise BadMessage(400, "a chunk's size line is malformed")
        if len(line) > len(size[1]):
            self._wasted(len(line) - len(size[1]))
        length = int(size[1], 16)
        if length:
            self._left = length + 2
        else:
            self._trailers = True

    def _wasted(self, num_bytes: int) -> None:
        self._waste += num_bytes
        if self._waste > _MAX_WASTE:
            raise BadMessage(400, f"more than {_MAX_WASTE} bytes of chunk extensions and trailers")
