"""TLS in the server and the client, and peers with wrong certificates or without TLS."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from waiting import LONG_S
from wire import Bad, Peer, Run, echo

from stoker.gateway.http import ClientLimits, ConnectionPool, HttpRequest, Origin, Server, ServerLimits, Unreachable

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    folder: Path = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    return server, ssl.create_default_context(cafile=cert)


def test_tls_end_to_end(run: Run, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def stream(request: HttpRequest) -> None:
        if request.path != b"/stream":
            await echo(request)
            return
        request.start(200, [])
        for _ in range(3):
            request.write(b"x" * 100_000)
            await asyncio.sleep(0.01)
        request.finish()

    async def main() -> None:
        server = Server(stream, ServerLimits(), on_bad=Bad())
        await server.listen("127.0.0.1", 0, ssl=contexts[0])
        pool = ConnectionPool(Origin.from_url(f"https://127.0.0.1:{server.port}", contexts[1]), ClientLimits())
        for _ in range(2):
            answer = await pool.send(b"POST", b"/t", [], b"x" * 1_000_000, connect_s=LONG_S, head_s=LONG_S)
            assert await answer.read(2_000_000) == b"POST|/t||" + b"x" * 1_000_000
            answer = await pool.send(b"GET", b"/stream", [], b"", connect_s=LONG_S, head_s=LONG_S)
            assert await answer.read(2_000_000) == b"x" * 300_000
        assert pool.num_open == 1
        pool.close()
        await server.close(1)

    run(main())


def test_a_bad_request_over_tls_is_refused(run: Run, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def main() -> None:
        bad = Bad()
        server = Server(echo, ServerLimits(), on_bad=bad)
        await server.listen("127.0.0.1", 0, ssl=contexts[0])
        client = Peer(*await asyncio.open_connection("127.0.0.1", server.port, ssl=contexts[1]))
        client.send(b"GET /../x HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await client.answer())[0] == 400
        await client.close()
        assert len(bad) == 1
        await server.close(0)

    run(main())


def test_strangers_are_unreachable(run: Run, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def main() -> None:
        server = Server(echo, ServerLimits(), on_bad=Bad())
        await server.listen("127.0.0.1", 0, ssl=contexts[0])
        untrusting = ConnectionPool(Origin.from_url(f"https://127.0.0.1:{server.port}"), ClientLimits())
        with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await untrusting.send(b"GET", b"/", [], b"", connect_s=LONG_S, head_s=LONG_S)
        await server.close(0)

        plain = Server(echo, ServerLimits(), on_bad=Bad())
        await plain.listen("127.0.0.1", 0)
        pool = ConnectionPool(Origin.from_url(f"https://127.0.0.1:{plain.port}", contexts[1]), ClientLimits())
        with pytest.raises(Unreachable):
            await pool.send(b"GET", b"/", [], b"", connect_s=LONG_S, head_s=LONG_S)
        assert pool.num_open == 0
        await plain.close(0)

    run(main())
