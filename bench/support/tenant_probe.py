"""A paying tenant's steady load and a /health prober, in one process. Needs uvloop.

    python -m bench.support.tenant_probe PORT KEY SECONDS [--interval-ms 20]

Requests begin at fixed times, however slow the gateway is (open loop), and a latency counts from that time: a stalled
gateway cannot hide its stall. Every interval there is one GET /health, in turn on a kept connection and on a new one.
Every fifth interval there is a chat, in turn streamed and whole, on kept connections as HTTP clients use them.

It prints a line when it starts, and at the end all samples as one line of JSON. A sample is
[kind, start_s, latency_s, problem]. Times are those of the monotonic clock, which all processes share. The problem is empty if
the request was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import cast

TIMEOUT_S = 10.0
Sample = tuple[str, float, float, str]


class _Exchange(asyncio.Protocol):
    """A client connection that carries one request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._done: asyncio.Future[str] | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(f"closed: {error or 'end of file'}")

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length:")
        if at >= 0:
            is_complete = len(body) >= int(head[at + 15 :].partition(b"\r\n")[0])
        else:
            is_complete = body.endswith(b"0\r\n\r\n")
        if is_complete:
            status = head[9:12].decode()
            is_cut = b"data: {" in body and b"data: [DONE]" not in body
            self._end("" if status == "200" and not is_cut else f"status {status}{' without an end' * is_cut}")

    async def ask(self, request: bytes) -> str:
        """Return why the request was not answered, or nothing."""
        self._received = b""
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._done

    def _end(self, problem: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(problem)


class Prober:
    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._idle: dict[str, list[_Exchange]] = {"health": [], "chat": []}
        self.samples: list[Sample] = []
        self._requests = {
            "health kept": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            "health new": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            "chat whole": _chat(key, stream=False),
            "chat stream": _chat(key, stream=True),
        }

    async def probe(self, kind: str, start_s: float) -> None:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + TIMEOUT_S):
                problem = await self._once(kind)
        except TimeoutError:
            problem = f"no answer within {TIMEOUT_S:g} s"
        except OSError as error:
            problem = f"cannot connect: {error.strerror or error}"
        self.samples.append((kind, start_s, time.monotonic() - start_s, problem))

    async def _once(self, kind: str) -> str:
        """Send the request. Like any HTTP client, repeat it if a kept connection was closed before an answer came."""
        idle = self._idle[kind.partition(" ")[0]]
        while kind != "health new" and idle:
            exchange = idle.pop()
            if exchange.is_open and not (problem := await exchange.ask(self._requests[kind])).startswith("closed"):
                idle.append(exchange)
                return problem
        loop = asyncio.get_running_loop()
        _, exchange = await loop.create_connection(_Exchange, "127.0.0.1", self._port)
        problem = ""
        try:
            problem = await exchange.ask(self._requests[kind])
        finally:
            if kind == "health new" or problem or not exchange.is_open:
                exchange.transport.close()
        if kind != "health new" and not problem:
            idle.append(exchange)
        return problem


def _chat(key: str, stream: bool) -> bytes:
    message = {"role": "user", "content": "Hello, please tell me a story about a fox. " + "word " * 50}
    body = json.dumps({"model": "mock", "messages": [message], "stream": stream, "max_tokens": 16}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def measure(port: int, key: str, seconds: float, interval_s: float) -> list[Sample]:
    prober = Prober(port, key)
    print("started", flush=True)
    begin_s = time.monotonic()
    tasks = []
    for number in range(int(seconds / interval_s)):
        start_s = begin_s + number * interval_s
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        kinds = [("health kept", "health new")[number % 2]]
        if number % 5 == 2:
            kinds.append(("chat whole", "chat stream")[number // 5 % 2])
        tasks += [asyncio.create_task(prober.probe(kind, start_s)) for kind in kinds]
    await asyncio.gather(*tasks)
    return prober.samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("key")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--interval-ms", type=float, default=20.0, help="default: %(default)s")
    args = parser.parse_args()

    import uvloop

    print(json.dumps(uvloop.run(measure(args.port, args.key, args.seconds, args.interval_ms / 1e3))))


if __name__ == "__main__":
    main()
