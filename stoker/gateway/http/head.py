"""Heads of requests and answers: the grammar of RFC 9112 as regular expressions, with nothing lenient in it.

A proxy that accepts what another server reads differently lets requests be smuggled past it. So: CRLF only, no folded lines, no
space before a colon, one length at most and said in one way, no path that a server behind us might resolve to another one.
Heads are parsed whole, once their end is there: splitting of the stream cannot change what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import TypeVar

from stoker.gateway.http.errors import BadMessage

# Pairs, or lines that were formatted beforehand with `header_block`: what never changes is formatted once.
Headers = Sequence[tuple[bytes, bytes]] | bytes

T = TypeVar("T")

CHUNKED = -1
UNTIL_CLOSE = -2

METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"})

_REQUEST_LINE = re.compile(rb"([A-Z]+) (/[A-Za-z0-9\-._~!$&'()*+,;=:@%/]*)(?:\?([!-\"$-~]*))? HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_VERSION = re.compile(rb"[^\r\n]* HTTP/([0-9](?:\.[0-9])?)")
_REQUEST_SHAPE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([^ \r\n]+) HTTP/1\.[01]")
_CONTENT_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,18})(?:\r\n|\Z)")
# An escaped slash may stay: names have them (`org%2Fmodel`), it is not read as a slash here, and no path is passed on.
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})|%(?:2[eE5]|5[cC]|[01][0-9A-Fa-f]|7[fF])")

_MAX_SEEN = 2048  # lines that a parser remembers
_MAX_SEEN_BYTES = 512  # the longest of them
_MAX_SHAPE_BYTES = 2048  # the longest head that is remembered whole

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
    """Never changed: many messages have the same one. The body's length is not part of it."""

    __slots__ = ("by_name", "headers", "keep_alive", "passed")

    headers: list[tuple[bytes, bytes]]  # without content-length
    by_name: dict[bytes, bytes]  # the first of each name
    keep_alive: bool
    passed: dict[HeaderFilter, bytes]  # what of it was handed on before

    def hold(self, headers: list[tuple[bytes, bytes]]) -> None:
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


class AnswerHead(Head):
    __slots__ = ("has_body", "status")

    status: int
    has_body: bool  # False: none follows, whatever length is said


H = TypeVar("H", bound=Head)


class HeadParser:
    """Remembers what it has seen: a peer's heads mostly differ in the body's length alone, others in a line or two, and
    looking one up is far cheaper than checking it anew. A head is given without the empty line that ends it."""

    __slots__ = ("_answers", "_headers", "_max_headers", "_request_lines", "_requests", "_special", "_status_lines")

    def __init__(self, max_headers: int) -> None:
        self._max_headers = max_headers
        self._requests: dict[bytes, RequestHead] = {}  # by a head without the digits of its length
        self._answers: dict[bytes, AnswerHead] = {}
        self._headers: dict[bytes, tuple[bytes, bytes]] = {}
        self._special: dict[bytes, tuple[bytes, bytes]] = {}  # those that say how a message ends
        self._request_lines: dict[bytes, tuple[bytes, bytes, bytes, int]] = {}
        self._status_lines: dict[bytes, tuple[int, int]] = {}

    def request(self, head: bytes) -> tuple[RequestHead, int]:
        """What it says, and the length of the body, or CHUNKED."""
        return _by_shape(head, self._requests, self._request)

    def answer(self, head: bytes) -> tuple[AnswerHead, int]:
        """What it says, and the length of the body, or CHUNKED, or UNTIL_CLOSE."""
        return _by_shape(head, self._answers, self._answer)

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
        parsed.hold(self._read(lines, framing))
        return parsed, _frame_request(parsed, framing)

    def _answer(self, head: bytes) -> tuple[AnswerHead, int]:
        lines = head.split(b"\r\n")
        line = lines[0]
        start = self._status_lines.get(line)
        if start is None:
            match = _STATUS_LINE.fullmatch(line)
            if match is None:
                raise BadMessage(502, f"not a status line: {line[:60]!r}")
            start = (int(match[1]), int(match[2]))
            _remember(self._status_lines, line, start)
        parsed = AnswerHead()
        minor, parsed.status = start
        parsed.has_body = parsed.status >= 200 and parsed.status not in (204, 304)
        parsed.keep_alive = minor == 1
        framing: list[tuple[bytes, bytes]] = []
        parsed.hold(self._read(lines, framing))
        return parsed, _frame_answer(parsed, framing)

    def _read(self, lines: list[bytes], framing: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """All headers; those that say how the message ends are put into `framing`, too."""
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
    """Headers as lines. A line break inside a header would be a second header: refused."""
    block = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if block.count(b"\n") != len(headers) or block.count(b"\r") != len(headers):
        raise ValueError(f"a header holds a line break: {block[:200]!r}")
    return block


def end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What a proxy may hand on: all but the headers that were about the connection they came over."""
    kept = [pair for pair in headers if pair[0] not in _HOP_BY_HOP]
    for name, value in headers:
        if name == b"connection" and value != b"keep-alive":
            named = _words(value)
            kept = [pair for pair in kept if pair[0] not in named]
    return kept


class HeaderFilter:
    """What of a peer's headers is handed on: the end-to-end ones but for `names` and what begins with one of `prefixes`.
    What passed is remembered, since a peer's next message has most of it again."""

    __slots__ = ("_dropped", "_lines", "_prefixes")

    def __init__(self, names: Collection[bytes], prefixes: tuple[bytes, ...]) -> None:
        self._dropped = _HOP_BY_HOP.union(names)
        self._prefixes = prefixes
        self._lines: dict[tuple[bytes, bytes], bytes] = {}

    def pairs(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [pair for pair in end_to_end(headers) if pair[0] not in self._dropped and self._passes(pair)]

    def block(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """The same, as lines."""
        lines = []
        for pair in headers:
            line = self._lines.get(pair)
            if line is None:
                if pair[0] in self._dropped:
                    if pair[0] == b"connection" and pair[1] != b"keep-alive":
                        return header_block(self.pairs(headers))  # it may name others that are not to be handed on
                    continue
                line = self._learn(pair)
            lines.append(line)
        return b"".join(lines)

    def block_of(self, head: Head) -> bytes:
        """The same, of a head that often came before."""
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
    """Heads that differ in nothing but their length are parsed once."""
    length = _CONTENT_LENGTH.search(head)
    if length is None:
        return parse(head)
    start, end = length.span(1)
    shape = head[:start] + head[end:]
    found = known.get(shape)
    if found is not None:
        return found, int(length[1])
    parsed = parse(head)  # refuses a second length: no head that is remembered has one
    if len(shape) <= _MAX_SHAPE_BYTES:
        if len(known) >= _MAX_SEEN:
            known.clear()
        known[shape] = parsed[0]
    return parsed


def _remember(seen: dict[bytes, T], line: bytes, meaning: T) -> None:
    """Bounded by starting over: what is common is back at once."""
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
                raise BadMessage(501, "the only transfer-encoding that we take is chunked")
            length = CHUNKED
        elif value.lower() == b"100-continue":
            parsed.expects = parsed.minor == 1
        else:
            raise BadMessage(417, "the only expectation that we take is 100-continue")
    if num_hosts > 1 or (num_hosts == 0 and parsed.minor == 1):
        raise BadMessage(400, f"{num_hosts} host headers instead of one")
    return length or 0


def _frame_answer(parsed: AnswerHead, framing: list[tuple[bytes, bytes]]) -> int:
    length: int | None = None
    for name, value in framing:
        if name == b"connection":
            parsed.keep_alive = _keeps_alive(value, parsed.keep_alive)
        elif name == b"content-length":
            if length is not None:
                raise BadMessage(502, "an answer with two lengths")
            length = _length(value)
        elif name == b"transfer-encoding":
            if length is not None or value.lower() != b"chunked":
                raise BadMessage(502, f"an answer with transfer-encoding {value[:40]!r} (and length {length})")
            length = CHUNKED
    return UNTIL_CLOSE if length is None else length


def _length(value: bytes) -> int:
    if not value.isdigit():
        raise BadMessage(400, "content-length is not a number")
    # So many digits are beyond every limit; we spare ourselves the arithmetic.
    return int(value) if len(value) < 19 else 10**18


def _words(value: bytes) -> list[bytes]:
    return [word.strip(b" \t") for word in value.lower().split(b",")]


def _keeps_alive(value: bytes, keep_alive: bool) -> bool:
    if value == b"keep-alive":
        return True
    words = _words(value)
    return b"close" not in words and (keep_alive or b"keep-alive" in words)


def _check_path(path: bytes) -> None:
    """Refuses what another server may read as a different path than we do."""
    if b"//" in path or _BAD_ESCAPE.search(path) is not None:
        raise BadMessage(400, "the path has empty, or deceptively escaped parts")
    if any(part in (b".", b"..") for part in path.split(b"/")):
        raise BadMessage(400, "the path has dot segments")


def _bad_request_line(line: bytes) -> BadMessage:
    shape = _REQUEST_SHAPE.fullmatch(line)
    if shape is None:
        version = _VERSION.fullmatch(line)
        if version is not None and version[1] not in (b"1.0", b"1.1"):
            return BadMessage(505, "this server speaks HTTP/1.1")
        return BadMessage(400, "the request line is malformed")
    if shape[1] not in METHODS:
        return BadMessage(501, f"method {shape[1][:20].decode()} is not supported")
    return BadMessage(400, "the request target is not a plain absolute path")
