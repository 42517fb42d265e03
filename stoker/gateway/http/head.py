"""Strict parser of request and response heads: the grammar of RFC 9112 as regular expressions.

A proxy that reads a message differently from the server behind it enables request smuggling. So lines must end in CRLF,
folded lines and spaces before a colon are refused, there is at most one body length in one notation, and paths that another
server might resolve differently are refused. A head is parsed as a whole once it is complete, so how the stream was split
into packets cannot change its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import TypeVar

from stoker.gateway.http.errors import BadMessage

# Pairs, or lines formatted in advance with `header_block`.
Headers = Sequence[tuple[bytes, bytes]] | bytes

T = TypeVar("T")

CHUNKED = -1
UNTIL_CLOSE = -2

METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE"})

_REQUEST_LINE = re.compile(rb"([A-Z]+) (/[A-Za-z0-9\-._~!$&'()*+,;=:@%/]*)(?:\?([!-\"$-~]*))? HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_VERSION = re.compile(rb"[^\r\n]* HTTP/([0-9](?:\.[0-9])?)")
_REQUEST_SHAPE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([^ \r\n]+) HTTP/1\.[01]")
_CONTENT_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,18})(?:\r\n|\Z)")
# An escaped slash is allowed: model names contain it (`org%2Fmodel`), it is not read as a slash here, and no client path is
# passed on to a worker.
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})|%(?:2[eE5]|5[cC]|[01][0-9A-Fa-f]|7[fF])")

_MAX_SEEN = 2048  # lines that a parser caches
_MAX_SEEN_BYTES = 512  # the longest cached line
_MAX_SHAPE_BYTES = 2048  # the longest head that is cached as a whole

_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection", b"host", b"expect"})
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


class Head:
    """A parsed head. Immutable, because messages that differ only in their body length share one."""

    __slots__ = ("by_name", "headers", "keep_alive", "passed")

    headers: list[tuple[bytes, bytes]]  # without content-length
    by_name: dict[bytes, bytes]  # the first value of each lower-case name
    keep_alive: bool
    passed: dict[HeaderFilter, bytes]  # cached output of each filter

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this lower-case name."""
        return self.by_name.get(name)

    def set_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers = [pair for pair in headers if pair[0] != b"content-length"]
        self.by_name = dict(reversed(self.headers))
        self.passed = {}


class RequestHead(Head):
    __slots__ = ("expects", "method", "minor", "path", "query")

    method: bytes
    path: bytes
    query: bytes
    minor: int
    expects: bool


class ResponseHead(Head):
    __slots__ = ("has_body", "status")

    status: int
    has_body: bool  # False: no body follows, whatever content-length says


H = TypeVar("H", bound=Head)


class HeadParser:
    """Parses heads, with caches: most heads repeat except for the body length, and the others differ in a line or two.

    A cache lookup is far cheaper than matching the grammar again. Heads are passed without the empty line that ends them.
    """

    __slots__ = ("_headers", "_max_headers", "_request_lines", "_requests", "_responses", "_special", "_status_lines")

    def __init__(self, max_headers: int) -> None:
        self._max_headers = max_headers
        self._requests: dict[bytes, RequestHead] = {}  # keyed by the head without the digits of its content-length
        self._responses: dict[bytes, ResponseHead] = {}
        self._headers: dict[bytes, tuple[bytes, bytes]] = {}
        self._special: dict[bytes, tuple[bytes, bytes]] = {}  # headers that affect the framing
        self._request_lines: dict[bytes, tuple[bytes, bytes, bytes, int]] = {}
        self._status_lines: dict[bytes, tuple[int, int]] = {}

    def request(self, head: bytes) -> tuple[RequestHead, int]:
        """Return the parsed request head, and the length of the body or CHUNKED."""
        return _by_shape(head, self._requests, self._request)

    def response(self, head: bytes) -> tuple[ResponseHead, int]:
        """Return the parsed response head, and the length of the body, CHUNKED or UNTIL_CLOSE."""
        return _by_shape(head, self._responses, self._response)

    def _request(self, head: bytes) -> tuple[RequestHead, int]:
        lines = head.split(b"\r\n")
        line = lines[0]
        start = self._request_lines.get(line)
        if start is None:
            start = _request_line(line)
            _remember(self._request_lines, line, start)
        parsed = RequestHead()
        parsed.method, parsed.path, parsed.query, parsed.minor = start
        framing: list[tuple[bytes, bytes]] = []
        parsed.set_headers(self._read(lines, framing))
        return parsed, _frame_request(parsed, framing)

    def _response(self, head: bytes) -> tuple[ResponseHead, int]:
        lines = head.split(b"\r\n")
        line = lines[0]
        start = self._status_lines.get(line)
        if start is None:
            match = _STATUS_LINE.fullmatch(line)
            if match is None:
                raise BadMessage(502, f"not a status line: {line[:60]!r}")
            start = (int(match[1]), int(match[2]))
            _remember(self._status_lines, line, start)
        parsed = ResponseHead()
        minor, parsed.status = start
        parsed.has_body = parsed.status >= 200 and parsed.status not in (204, 304)
        parsed.keep_alive = minor == 1
        framing: list[tuple[bytes, bytes]] = []
        parsed.set_headers(self._read(lines, framing))
        return parsed, _frame_response(parsed, framing)

    def _read(self, lines: list[bytes], framing: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return all headers, and append those that affect the framing to `framing`."""
        if len(lines) > self._max_headers + 1:
            raise BadMessage(431, f"{len(lines) - 1} headers; at most {self._max_headers} are allowed")
        seen = self._headers.get
        headers = []
        for line in islice(lines, 1, None):
            pair = seen(line)
            if pair is None:
                pair = self._learn(line)
                if pair[0] in _FRAMING:
                    framing.append(pair)
            headers.append(pair)
        return headers

    def _learn(self, line: bytes) -> tuple[bytes, bytes]:
        pair = self._special.get(line)
        if pair is not None:
            return pair
        match = _HEADER.fullmatch(line)
        if match is None:
            raise BadMessage(400, "a header line is malformed")
        pair = (match[1].lower(), match[2].rstrip(b" \t"))
        _remember(self._special if pair[0] in _FRAMING else self._headers, line, pair)
        return pair


def header_block(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Format headers as lines. Raises ValueError for a line break inside a header, which would start another header."""
    block = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if block.count(b"\n") != len(headers) or block.count(b"\r") != len(headers):
        raise ValueError(f"a header holds a line break: {block[:200]!r}")
    return block


def end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that a proxy may forward: all but the hop-by-hop ones."""
    kept = [pair for pair in headers if pair[0] not in _HOP_BY_HOP]
    for name, value in headers:
        if name == b"connection" and value != b"keep-alive":
            named = _words(value)
            kept = [pair for pair in kept if pair[0] not in named]
    return kept


class HeaderFilter:
    """Selects the headers to forward: end-to-end headers except `names` and those that begin with one of `prefixes`.

    Formatted lines are cached, because the next message of a connection repeats most of them.
    """

    __slots__ = ("_dropped", "_lines", "_prefixes")

    def __init__(self, names: Collection[bytes], prefixes: tuple[bytes, ...]) -> None:
        self._dropped = _HOP_BY_HOP.union(names)
        self._prefixes = prefixes
        self._lines: dict[tuple[bytes, bytes], bytes] = {}

    def pairs(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [pair for pair in end_to_end(headers) if pair[0] not in self._dropped and self._passes(pair)]

    def block(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the forwarded headers as lines."""
        lines = []
        for pair in headers:
            line = self._lines.get(pair)
            if line is None:
                if pair[0] in self._dropped:
                    if pair[0] == b"connection" and pair[1] != b"keep-alive":
                        return header_block(self.pairs(headers))  # it may name more hop-by-hop headers
                    continue
                line = self._learn(pair)
            lines.append(line)
        return b"".join(lines)

    def block_of(self, head: Head) -> bytes:
        """Return the forwarded headers of a parsed head as lines, cached in the head."""
        block = head.passed.get(self)
        if block is None:
            block = head.passed[self] = self.block(head.headers)
        return block

    def _learn(self, pair: tuple[bytes, bytes]) -> bytes:
        line = header_block([pair]) if self._passes(pair) else b""
        if len(pair[1]) <= _MAX_SEEN_BYTES:
            if len(self._lines) >= _MAX_SEEN:
                self._lines.clear()
            self._lines[pair] = line
        return line

    def _passes(self, pair: tuple[bytes, bytes]) -> bool:
        return not pair[0].startswith(self._prefixes)


def _by_shape(head: bytes, known: dict[bytes, H], parse: Callable[[bytes], tuple[H, int]]) -> tuple[H, int]:
    """Parse a head, or return the cached result for a head that differs only in its content-length."""
    length = _CONTENT_LENGTH.search(head)
    if length is None:
        return parse(head)
    start, end = length.span(1)
    shape = head[:start] + head[end:]
    found = known.get(shape)
    if found is not None:
        return found, int(length[1])
    parsed = parse(head)  # raises for a second content-length, so no cached head has one
    if len(shape) <= _MAX_SHAPE_BYTES:
        if len(known) >= _MAX_SEEN:
            known.clear()
        known[shape] = parsed[0]
    return parsed


def _remember(seen: dict[bytes, T], line: bytes, meaning: T) -> None:
    """Cache a line. A full cache is cleared; common lines are soon cached again."""
    if len(line) <= _MAX_SEEN_BYTES:
        if len(seen) >= _MAX_SEEN:
            seen.clear()
        seen[line] = meaning


def _request_line(line: bytes) -> tuple[bytes, bytes, bytes, int]:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise _bad_request_line(line)
    method, path, query, minor = match.groups()
    if method not in METHODS:
        raise BadMessage(501, f"method {method[:20].decode()} is not supported")
    if b"/." in path or b"//" in path or b"%" in path:
        _check_path(path)
    return method, path, query or b"", int(minor)


def _frame_request(parsed: RequestHead, framing: list[tuple[bytes, bytes]]) -> int:
    parsed.keep_alive = parsed.minor == 1
    parsed.expects = False
    length: int | None = None
    num_hosts = 0
    for name, value in framing:
        if name == b"host":
            num_hosts += 1
        elif name == b"content-length":
            if length is not None:
                raise BadMessage(400, "more than one of content-length and transfer-encoding")
            length = _length(value)
        elif name == b"connection":
            parsed.keep_alive = _keeps_alive(value, parsed.keep_alive)
        elif name == b"transfer-encoding":
            if length is not None or parsed.minor == 0:
                raise BadMessage(
                    400, "more than one of content-length and transfer-encoding, or HTTP/1.0 with the latter"
                )
            if value.lower() != b"chunked":
                raise BadMessage(501, "the only supported transfer-encoding is chunked")
            length = CHUNKED
        elif value.lower() == b"100-continue":
            parsed.expects = parsed.minor == 1
        else:
            raise BadMessage(417, "the only supported expectation is 100-continue")
    if num_hosts > 1 or (num_hosts == 0 and parsed.minor == 1):
        raise BadMessage(400, f"{num_hosts} host headers; exactly one is required")
    return length or 0


def _frame_response(parsed: ResponseHead, framing: list[tuple[bytes, bytes]]) -> int:
    length: int | None = None
    for name, value in framing:
        if name == b"connection":
            parsed.keep_alive = _keeps_alive(value, parsed.keep_alive)
        elif name == b"content-length":
            if length is not None:
                raise BadMessage(502, "the response has two lengths")
            length = _length(value)
        elif name == b"transfer-encoding":
            if length is not None or value.lower() != b"chunked":
                raise BadMessage(502, f"the response has transfer-encoding {value[:40]!r} and content-length {length}")
            length = CHUNKED
    return UNTIL_CLOSE if length is None else length


def _length(value: bytes) -> int:
    if not value.isdigit():
        raise BadMessage(400, "content-length is not a number")
    # 19 digits or more exceed every limit, so the value is not computed.
    return int(value) if len(value) < 19 else 10**18


def _words(value: bytes) -> list[bytes]:
    return [word.strip(b" \t") for word in value.lower().split(b",")]


def _keeps_alive(value: bytes, keep_alive: bool) -> bool:
    if value == b"keep-alive":
        return True
    words = _words(value)
    return b"close" not in words and (keep_alive or b"keep-alive" in words)


def _check_path(path: bytes) -> None:
    """Refuse a path that another server may interpret differently."""
    if b"//" in path or _BAD_ESCAPE.search(path) is not None:
        raise BadMessage(400, "the path has empty segments or ambiguous percent-escapes")
    if any(part in (b".", b"..") for part in path.split(b"/")):
        raise BadMessage(400, "the path has dot segments")


def _bad_request_line(line: bytes) -> BadMessage:
    shape = _REQUEST_SHAPE.fullmatch(line)
    if shape is None:
        version = _VERSION.fullmatch(line)
        if version is not None and version[1] not in (b"1.0", b"1.1"):
            return BadMessage(505, "this server supports HTTP/1.0 and HTTP/1.1")
        return BadMessage(400, "the request line is malformed")
    if shape[1] not in METHODS:
        return BadMessage(501, f"method {shape[1][:20].decode()} is not supported")
    return BadMessage(400, "the request target is not a plain absolute path")
