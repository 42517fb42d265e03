"""Invalid HTTP never reaches a handler: it is refused with a reason, the connection is closed, and it is reported once."""

from __future__ import annotations

import json

import pytest
from waiting import until
from wire import GET, Run, ask, peer, serving

from stoker.gateway.http import HttpRequest, ServerLimits

LINE = b"POST /x HTTP/1.1\r\nHost: a\r\n"
HOST = b"\r\nHost: a\r\n\r\n"
CHUNKED = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"0\r\n\r\nGET /admin HTTP/1.1\r\nhost: a\r\n\r\n"


def lengths(*lines: bytes) -> bytes:
    return LINE + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + SMUGGLED


BAD: dict[str, tuple[int, bytes]] = {
    # lengths that two servers could read differently
    "length and chunked": (400, lengths(b"Content-Length: 5", b"Transfer-Encoding: chunked")),
    "chunked and length": (400, lengths(b"Transfer-Encoding: chunked", b"Content-Length: 5")),
    "xchunked": (501, lengths(b"Transfer-Encoding: xchunked")),
    "quoted chunked": (501, lengths(b'Transfer-Encoding: "chunked"')),
    "vertical tab chunked": (400, lengths(b"Transfer-Encoding: \x0bchunked")),
    "chunked, identity": (501, lengths(b"Transfer-Encoding: chunked, identity")),
    "gzip, chunked": (501, lengths(b"Transfer-Encoding: gzip, chunked")),
    "chunked twice": (400, lengths(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
    "identity and length": (501, lengths(b"Transfer-Encoding: identity")),
    "empty encoding": (501, lengths(b"Transfer-Encoding:")),
    "space before colon": (400, lengths(b"Transfer-Encoding : chunked")),
    "tab before name": (400, lengths(b"\tTransfer-Encoding: chunked")),
    "two lengths": (400, lengths(b"Content-Length: 5", b"Content-Length: 6")),
    "one length twice": (400, lengths(b"Content-Length: 5", b"Content-Length: 5")),
    "two lengths in two cases": (400, lengths(b"Content-Length: 5", b"CONTENT-LENGTH: 6")),
    "length and chunked in upper case": (400, lengths(b"CONTENT-LENGTH: 5", b"TRANSFER-ENCODING: CHUNKED")),
    "chunked with a parameter": (501, lengths(b"Transfer-Encoding: chunked;q=1")),
    "chunked with a comma": (501, lengths(b"Transfer-Encoding: chunked,")),
    "NUL behind chunked": (400, lengths(b"Transfer-Encoding: chunked\x00")),
    "no-break space behind chunked": (501, lengths(b"Transfer-Encoding: chunked\xa0")),
    "length with a semicolon": (400, lengths(b"Content-Length: 5;")),
    "length with a fraction": (400, lengths(b"Content-Length: 5.0")),
    "length list": (400, lengths(b"Content-Length: 5, 5")),
    "plus": (400, lengths(b"Content-Length: +5")),
    "minus": (400, lengths(b"Content-Length: -5")),
    "inner space": (400, lengths(b"Content-Length: 5 0")),
    "hex length": (400, lengths(b"Content-Length: 0x5")),
    "underscore": (400, lengths(b"Content-Length: 1_0")),
    "arabic digits": (400, lengths("Content-Length: ٥".encode())),
    "no length": (400, lengths(b"Content-Length:")),
    "1.0 chunked": (400, b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED),
    # lines
    "folded": (400, lengths(b"X-A: b", b" c")),
    "folded by tab": (400, lengths(b"X-A: b", b"\tTransfer-Encoding: chunked")),
    "fold first": (400, b"GET /x HTTP/1.1\r\n Host: a\r\n\r\n"),
    "bare LF": (400, b"GET /x HTTP/1.1\nHost: a\n\n"),
    "bare LF in a value": (400, lengths(b"X-A: b\nTransfer-Encoding: chunked")),
    "bare LF at the end": (400, b"GET /x HTTP/1.1\r\nHost: a\n\r\n\r\n"),
    "bare CR": (400, lengths(b"X-A: b\rTransfer-Encoding: chunked")),
    "NUL in a value": (400, lengths(b"X-A: b\x00c")),
    "NUL in a name": (400, lengths(b"X\x00A: b")),
    "control in a value": (400, lengths(b"X-A: \x1b[31m")),
    "no colon": (400, lengths(b"X-A")),
    "empty name": (400, lengths(b": b")),
    "space in a name": (400, lengths(b"X A: b")),
    "utf-8 name": (400, lengths("X-Ä: b".encode())),
    "no host": (400, b"GET /x HTTP/1.1\r\nX-A: b\r\n\r\n"),
    "two hosts": (400, b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    "empty line first": (400, b"\r\n" + GET),
    # request lines
    "absolute form": (400, b"GET http://other/x HTTP/1.1" + HOST),
    "authority form": (501, b"CONNECT a:443 HTTP/1.1" + HOST),
    "asterisk": (400, b"OPTIONS * HTTP/1.1" + HOST),
    "two slashes": (400, b"GET //x HTTP/1.1" + HOST),
    "inner two slashes": (400, b"GET /v1//x HTTP/1.1" + HOST),
    "dot dot": (400, b"GET /v1/../admin HTTP/1.1" + HOST),
    "dot dot at the end": (400, b"GET /v1/.. HTTP/1.1" + HOST),
    "dot": (400, b"GET /./admin HTTP/1.1" + HOST),
    "%2e%2e": (400, b"GET /v1/%2e%2e/admin HTTP/1.1" + HOST),
    "%2E.": (400, b"GET /v1/%2E./admin HTTP/1.1" + HOST),
    "%5c": (400, b"GET /v1/%5c../admin HTTP/1.1" + HOST),
    "%00": (400, b"GET /admin%00.txt HTTP/1.1" + HOST),
    "%0d%0a": (400, b"GET /x%0d%0aX:y HTTP/1.1" + HOST),
    "%25": (400, b"GET /v1/%252e%252e/admin HTTP/1.1" + HOST),
    "bad escape": (400, b"GET /v1/%zz HTTP/1.1" + HOST),
    "cut escape": (400, b"GET /v1/%2 HTTP/1.1" + HOST),
    "backslash": (400, b"GET /v1\\..\\admin HTTP/1.1" + HOST),
    "fragment": (400, b"GET /x#y HTTP/1.1" + HOST),
    "fragment in the query": (400, b"GET /x?a#y HTTP/1.1" + HOST),
    "space in the target": (400, b"GET /x y HTTP/1.1" + HOST),
    "two spaces": (400, b"GET  /x HTTP/1.1" + HOST),
    "tab": (400, b"GET\t/x HTTP/1.1" + HOST),
    "raw utf-8": (400, "GET /ä HTTP/1.1".encode() + HOST),
    "NUL in the target": (400, b"GET /x\x00 HTTP/1.1" + HOST),
    "control in the query": (400, b"GET /x?\x01 HTTP/1.1" + HOST),
    "no target": (400, b"GET HTTP/1.1" + HOST),
    "http 0.9": (400, b"GET /x\r\n\r\n"),
    "http 1.2": (505, b"GET /x HTTP/1.2" + HOST),
    "http 2": (505, b"GET /x HTTP/2.0" + HOST),
    "http 2 preface": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "http lower case": (400, b"GET /x http/1.1" + HOST),
    "trailing space": (400, b"GET /x HTTP/1.1 " + HOST),
    "lower case method": (501, b"get /x HTTP/1.1" + HOST),
    "odd method": (501, b"PROPFIND /x HTTP/1.1" + HOST),
    "TLS hello": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "binary": (400, bytes(range(128, 256))),
    # chunks
    "no size": (400, CHUNKED + b"\r\n"),
    "size with 0x": (400, CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n"),
    "size with plus": (400, CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n"),
    "size with minus": (400, CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n"),
    "size with underscore": (400, CHUNKED + b"0_5\r\nhello\r\n0\r\n\r\n"),
    "size with space": (400, CHUNKED + b" 5\r\nhello\r\n0\r\n\r\n"),
    "size with space behind": (400, CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n"),
    "space before an extension": (400, CHUNKED + b"5 ;a\r\nhello\r\n0\r\n\r\n"),
    "size with NUL": (400, CHUNKED + b"5\x00\r\nhello\r\n0\r\n\r\n"),
    "size with tab": (400, CHUNKED + b"\t5\r\nhello\r\n0\r\n\r\n"),
    "size in quotes": (400, CHUNKED + b'"5"\r\nhello\r\n0\r\n\r\n'),
    "size in other digits": (400, CHUNKED + "٥\r\nhello\r\n0\r\n\r\n".encode()),
    "end with a sign": (400, CHUNKED + b"-0\r\n\r\n"),
    "tiny chunks": (400, CHUNKED + b"1\r\nx\r\n" * 5000),
    "size overflow": (400, CHUNKED + b"10000000000000005\r\nhello\r\n0\r\n\r\n"),
    "size of sixteen digits": (400, CHUNKED + b"ffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
    "short chunk": (400, CHUNKED + b"6\r\nhello\r\n0\r\n\r\n"),
    "long chunk": (400, CHUNKED + b"4\r\nhello\r\n0\r\n\r\n"),
    "chunk ended by LF": (400, CHUNKED + b"5\r\nhello\n0\r\n\r\n"),
    "size ended by LF": (400, CHUNKED + b"5\nhello\r\n0\r\n\r\n"),
    "end ended by LF": (400, CHUNKED + b"0\r\n\n"),
    "CR in an extension": (400, CHUNKED + b"5;a\rb\r\nhello\r\n0\r\n\r\n"),
    "LF in an extension": (400, CHUNKED + b"5;\nhello\r\n0\r\n\r\n"),
    "long extension": (400, CHUNKED + b"5;" + b"a" * 10_000 + b"\r\nhello\r\n0\r\n\r\n"),
    "many extensions": (400, CHUNKED + (b"1;" + b"a" * 200 + b"\r\nx\r\n") * 1000 + b"0\r\n\r\n"),
    "many trailers": (400, CHUNKED + b"0\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n"),
    "folded trailer": (400, CHUNKED + b"0\r\nX-A: b\r\n c\r\n\r\n"),
    "trailer without a colon": (400, CHUNKED + b"0\r\nGET /admin HTTP/1.1\r\n\r\n"),
    # bombs
    "one huge header": (431, LINE + b"X-A: " + b"a" * 40_000),
    "huge header, whole": (431, LINE + b"X-A: " + b"a" * 40_000 + b"\r\n\r\n"),
    "many headers": (431, LINE + b"X-A: b\r\n" * 200 + b"\r\n"),
    "long target": (414, b"GET /" + b"a" * 40_000),
    "1 GB": (413, LINE + b"Content-Length: 1073741824\r\n\r\n"),
    "a length of 4300 digits": (413, LINE + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_and_reach_no_handler(run: Run, name: str) -> None:
    status, sent = BAD[name]
    reached: list[HttpRequest] = []

    async def handler(request: HttpRequest) -> None:
        reached.append(request)

    async def main() -> None:
        async with serving(handler) as (server, bad), peer(server.port) as client:
            client.send(sent)
            got, headers, body = await client.answer()
            assert got == status, (got, body)
            assert headers[b"connection"] == b"close"
            error = json.loads(body)["error"]
            assert error["type"] in ("invalid_request_error", "server_error")
            assert error["message"]
            assert await client.closed()
            assert (reached, len(bad)) == ([], 1)

    run(main())


@pytest.mark.parametrize(
    "path", [b"/.well-known/x", b"/a..b/..c", b"/models/Qwen%20x", b"/x:y@z;a=1,2", b"/...", b"/v1/"]
)
def test_honest_paths_pass(run: Run, path: bytes) -> None:
    async def main() -> None:
        async with serving() as (server, bad):
            assert (await ask(server.port, b"GET %b HTTP/1.1" % path + HOST))[2] == b"GET|%b||" % path
            assert bad == []

    run(main())


def test_a_bad_request_behind_good_ones_is_refused_in_its_turn(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, bad), peer(server.port) as client:
            client.send(GET + GET + b"nonsense\r\n\r\n" + GET)
            assert [(await client.answer())[0] for _ in range(3)] == [200, 200, 400]
            assert await client.closed()
            assert len(bad) == 1

    run(main())


def test_a_body_that_is_too_large_is_refused_without_reading_it(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, bad), peer(server.port) as client:
            client.send(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (1 << 30))
            piece = b"x" * (1 << 20)
            for _ in range(64):
                client.send(piece)
            assert (await client.answer())[0] == 413
            # A part is read and dropped, so that the error reaches the client; most of it is not read.
            await until(lambda: all(one._read_paused for one in server._connections))
            assert client.writer.transport.get_write_buffer_size() > 40 << 20
            await until(lambda: server.num_connections == 0)
            assert len(bad) == 1

    run(main())


def test_a_chunked_body_that_grows_too_large_is_refused(run: Run) -> None:
    async def main() -> None:
        async with serving(limits=ServerLimits(max_body_bytes=10_000)) as (server, bad), peer(server.port) as client:
            client.send(CHUNKED + b"400\r\n%b\r\n" % (b"x" * 1024) * 12)
            assert (await client.answer())[0] == 413
            assert len(bad) == 1
        async with serving(limits=ServerLimits(max_body_bytes=10_000)) as (server, _):
            exact = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 10000\r\n\r\n" + b"x" * 10_000
            assert (await ask(server.port, exact))[0] == 200

    run(main())
