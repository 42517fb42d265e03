"""An OpenAI-compatible worker that answers at once, for benchmarks of routers.

    python -m bench.support.mock_worker PORT [--chunks 64] [--delay-ms 0] [--whole-ms 0] [--tokenizer FOLDER]

It is as cheap as Python allows: one protocol object per connection, answers encoded once. A streamed answer is
`--chunks` events with one write each, `--delay-ms` apart. Needs uvloop. With `--tokenizer`, it describes itself as a Stoker
worker, so that the gateway tokenizes prompts.

A body that contains one of these markers gets another answer:

    stoker-mock-kill       the connection is closed without an answer, as if the request had crashed the worker
    stoker-mock-flood      a streamed answer of 5,000 events, without pauses
    "timeout_s":           504, as a Stoker worker answers a deadline that the client set too short
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

MODEL = "mock"
KILL_MARKER, FLOOD_MARKER = "stoker-mock-kill", "stoker-mock-flood"
_LARGEST_BODY = 64 << 20
_FLOOD_EVENTS = 5_000
_DEADLINE_FIELD = b'"timeout_s":'


def _response(value: object, status: bytes = b"200 OK") -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return _http_chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")


class Answers:
    """Everything that the worker ever sends, encoded beforehand."""

    def __init__(
        self, num_chunks: int, delay_s: float, whole_s: float = 0.0, text_files: dict[str, str] | None = None
    ) -> None:
        self.delay_s, self.whole_s = delay_s, whole_s
        message = {"role": "assistant", "content": "tok " * num_chunks}
        usage = {"prompt_tokens": 8, "completion_tokens": num_chunks, "total_tokens": num_chunks + 8}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}
        self.whole = _response({**head, "choices": [choice], "usage": usage})
        model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "bench", "max_model_len": 8192}
        self.models = _response({"object": "list", "data": [model]})
        # Routers of several projects ask for different descriptions; this one has the fields of all of them.
        self.info = _response(
            {
                "model_id": MODEL,
                "model_path": MODEL,
                "served_model_name": MODEL,
                "tokenizer_path": "",
                "is_generation": True,
                "max_total_num_tokens": 100_000,
                "tp_size": 1,
                "dp_size": 1,
                "version": "0",
                "disaggregation_mode": "null",
                "internal_states": [{}],
            }
        )
        absent = _response({"error": {"message": "not found"}}, b"404 Not Found")
        self.described = {b"/stoker/worker": absent, b"/stoker/tokenizer": absent}
        if text_files is not None:
            worker: dict[str, Any] = {
                "worker_id": "w-mock",
                "role": "unified",
                "models": [MODEL],
                "fingerprint": "mock",
                "tokenizer": "mock",
            }
            worker |= {
                "block_tokens": 16,
                "num_blocks": 4096,
                "max_model_tokens": 1_000_000,
                "events": None,
                "replay": None,
            }
            self.described = {
                b"/stoker/worker": _response(worker),
                b"/stoker/tokenizer": _response({"files": text_files}),
            }
        late = {"message": "The deadline passed.", "type": "timeout_error", "param": None, "code": "deadline_exceeded"}
        self.late = _response({"error": late}, b"504 Gateway Timeout")
        self.stream_head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.events = [_event({"content": f"tok{number} "}, None) for number in range(num_chunks)]
        self.stream_end = _event({}, "stop") + _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class WorkerConnection(asyncio.Protocol):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._received = b""
        self._is_open = True
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def connection_lost(self, error: Exception | None) -> None:
        self._is_open = False

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (request := self._next_request()) is not None:
            self._answer(*request)

    def _next_request(self) -> tuple[bytes, bytes] | None:
        """The path and the body of the next complete request."""
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self._received[:end].lower()
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"http/1"):  # such as an HTTP/2 preface
            self._transport.close()
            self._received = b""
            return None
        start = end + 4
        if b"transfer-encoding: chunked" in head:
            stop = self._received.find(b"0\r\n\r\n", start)
            next_start = stop + 5
        else:
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
            if length > _LARGEST_BODY:
                self._transport.close()
                return None
            stop = next_start = start + length
            if len(self._received) < stop:
                return None
        if stop < 0:
            return None
        body = self._received[start:stop]
        self._received = self._received[next_start:]
        return words[1], body

    def _answer(self, path: bytes, body: bytes) -> None:
        if b"completions" in path:
            if KILL_MARKER.encode() in body:
                self._transport.abort()
            elif _DEADLINE_FIELD in body:
                self._transport.write(self._answers.late)
            elif FLOOD_MARKER.encode() in body:
                self._transport.write(self._answers.stream_head + self._answers.events[0] * _FLOOD_EVENTS)
                self._transport.write(self._answers.stream_end)
            elif b'"stream":true' in body or b'"stream": true' in body:
                self._start(self._stream())
            elif self._answers.whole_s:
                self._start(self._whole())
            else:
                self._transport.write(self._answers.whole)
        elif b"models" in path:
            self._transport.write(self._answers.models)
        else:
            self._transport.write(self._answers.described.get(path, self._answers.info))

    def _start(self, answering: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(answering)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _whole(self) -> None:
        await asyncio.sleep(self._answers.whole_s)
        if self._is_open:
            self._transport.write(self._answers.whole)

    async def _stream(self) -> None:
        self._transport.write(self._answers.stream_head)
        for event in self._answers.events:
            if not self._is_open:
                return
            self._transport.write(event)
            await asyncio.sleep(self._answers.delay_s)
        self._transport.write(self._answers.stream_end)


async def serve(port: int, answers: Answers, num_addresses: int = 1) -> None:
    loop = asyncio.get_running_loop()
    hosts = [f"127.0.0.{number + 1}" for number in range(num_addresses)]
    server = await loop.create_server(lambda: WorkerConnection(answers), hosts, port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--chunks", type=int, default=64, help="events of a streamed answer (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="between two events (default: %(default)s)")
    parser.add_argument("--whole-ms", type=float, default=0.0, help="before a whole answer (default: %(default)s)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="model folder with a tokenizer (default: none)"
    )
    parser.add_argument(
        "--addresses", type=int, default=1, help="listen on 127.0.0.1 to 127.0.0.N, as N workers (default: %(default)s)"
    )
    args = parser.parse_args()

    import uvloop

    files = None
    if args.tokenizer is not None:
        from stoker.text.folder import text_files

        files = text_files(args.tokenizer)
    answers = Answers(args.chunks, args.delay_ms / 1e3, args.whole_ms / 1e3, files)
    uvloop.run(serve(args.port, answers, args.addresses))


if __name__ == "__main__":
    main()
