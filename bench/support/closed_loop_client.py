"""A client that keeps N connections busy: each sends its next chat when the last one is answered.

    python -m bench.support.closed_loop_client PORT CONNECTIONS SECONDS stream|full

Prints one JSON object: requests and chunks, their rates, and latencies. Needs uvloop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast

_TEXT = "Hello, please tell me a story about a fox. " + "word " * 50
_STREAM_END = b"0\r\n\r\n"


def request_bytes(model: str, stream: bool) -> bytes:
    message = {"role": "user", "content": _TEXT}
    fields = {"model": model, "messages": [message], "stream": stream, "max_tokens": 64}
    body = json.dumps(fields, separators=(",", ":")).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer sk-1234\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Counts:
    end_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    num_chunks: int = 0
    num_failed: int = 0
    first_failure: str = ""


class ClientConnection(asyncio.Protocol):
    def __init__(self, request: bytes, stream: bool, counts: Counts) -> None:
        self._request, self._stream, self._counts = request, stream, counts
        self._received = b""
        self._has_status = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if time.perf_counter() < self._counts.end_s:
            self._fail(f"the connection was closed: {error}")

    def data_received(self, data: bytes) -> None:
        if not self._has_status:
            self._has_status = True
            if data[9:12] != b"200":
                self._fail(data[:200].decode(errors="replace"))
        if self._stream:
            self._counts.num_chunks += data.count(b"data: {")
            self._received = (self._received + data)[-len(_STREAM_END) :]
            if self._received == _STREAM_END:
                self._answered()
        else:
            self._received += data
            if self._is_complete():
                self._answered()

    def _is_complete(self) -> bool:
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return False
        at = head.lower().find(b"content-length:")
        if at < 0:
            return body.endswith(_STREAM_END)
        return len(body) >= int(head[at + 15 :].partition(b"\r\n")[0])

    def _send(self) -> None:
        self._received, self._has_status = b"", False
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def _answered(self) -> None:
        now_s = time.perf_counter()
        self._counts.latencies_s.append(now_s - self._sent_s)
        if now_s < self._counts.end_s:
            self._send()
        else:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        self._counts.num_failed += 1
        self._counts.first_failure = self._counts.first_failure or reason


async def measure(port: int, connections: int, seconds: float, stream: bool, model: str) -> dict[str, float | str]:
    loop, counts = asyncio.get_running_loop(), Counts()
    request = request_bytes(model, stream)
    counts.end_s = time.perf_counter() + seconds
    for _ in range(connections):
        await loop.create_connection(lambda: ClientConnection(request, stream, counts), "127.0.0.1", port)
    begin_s = time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed_s = time.perf_counter() - begin_s
    ordered = sorted(counts.latencies_s)

    def percentile_ms(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3 if ordered else -1.0

    return {
        "requests": len(ordered),
        "requests_per_s": len(ordered) / elapsed_s,
        "chunks": counts.num_chunks,
        "chunks_per_s": counts.num_chunks / elapsed_s,
        "p50_ms": percentile_ms(0.5),
        "p99_ms": percentile_ms(0.99),
        "failed": counts.num_failed,
        "first_failure": counts.first_failure,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("connections", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("mode", choices=("stream", "full"))
    parser.add_argument("--model", default="mock")
    args = parser.parse_args()

    import uvloop

    print(json.dumps(uvloop.run(measure(args.port, args.connections, args.seconds, args.mode == "stream", args.model))))


if __name__ == "__main__":
    main()
