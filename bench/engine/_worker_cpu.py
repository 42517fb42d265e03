"""The processes of `worker_cpu`: the server, the process that plays the engine, and the client.

python -m bench.engine._worker_cpu server MODEL_DIR STEP_S
python -m bench.engine._worker_cpu engine FD STEP_S VOCAB_SIZE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import uvloop
from aiohttp import web

from bench.support.processes import environment, python_module
from stoker.base import garbage
from stoker.base import log as logs
from stoker.base.config import EngineSettings
from stoker.proto.messages import Add, Cancel, Chunks, EngineArguments, EngineInfo
from stoker.proto.pipe import EngineEnd, FrameEnd
from stoker.sched.request import Finish, GenerateRequest, TokenChunks, TokenUsage
from stoker.worker.app import make_app, make_runner
from stoker.worker.config import HttpConfig
from stoker.worker.context import ModelText
from stoker.worker.service import EngineService
from stoker.worker.spawn import SpawnedEngine

_MODULE = "bench.engine._worker_cpu"
TOKENS_IN, TOKENS_OUT = 512, 256
WARMUP_TOKENS = 32
NAME = "bench"
END = b"\r\n0\r\n\r\n"  # the last HTTP chunk, which is empty


# ---- the process that plays the engine


def play_engine(fd: int, step_s: float, vocab_size: int) -> None:
    pipe = EngineEnd(socket.socket(fileno=fd))
    pipe.receive()  # EngineArguments
    pipe.send(
        EngineInfo(
            model_fingerprint="0123456789abcdef",
            device="none",
            dtype="none",
            vocab_size=vocab_size,
            max_model_tokens=8192,
            block_tokens=64,
            num_blocks=1 << 16,
            max_rows=1024,
            load_s=0.0,
        )
    )
    mail: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                mail.put(pipe.receive())
        except FrameEnd:
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    running: dict[str, tuple[GenerateRequest, random.Random, int]] = {}
    while True:
        time.sleep(step_s - time.monotonic() % step_s)
        while not mail.empty():
            match mail.get():
                case Add(request=request):
                    running[request.request_id] = (request, random.Random(sum(request.token_ids)), 0)
                case Cancel(request_id=request_id):
                    running.pop(request_id, None)
        if chunks := _step(running, vocab_size):
            pipe.send(Chunks(chunks=chunks))


def _step(running: dict[str, tuple[GenerateRequest, random.Random, int]], vocab_size: int) -> TokenChunks:
    """One token for each open sequence. The same prompt always gets the same tokens."""
    chunks = TokenChunks()
    for request_id, (request, tokens, done) in list(running.items()):
        running[request_id] = (request, tokens, done + 1)
        is_last = done + 1 == request.max_new_tokens
        usage = TokenUsage(request.num_prompt, 0, done + 1) if is_last or not done else None
        finish = Finish("length") if is_last else None
        chunks.add(request.request_id, [tokens.randrange(vocab_size)], usage, finish=finish)
        if is_last:
            del running[request_id]
    return chunks


# ---- the server


def _spawn(step_s: float, vocab_size: int) -> SpawnedEngine:
    ours, theirs = socket.socketpair()
    with theirs:
        command = python_module(_MODULE, "engine", theirs.fileno(), step_s, vocab_size)
        return SpawnedEngine(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment()), ours)


async def serve(folder: Path, step_s: float) -> None:
    text = ModelText.from_folder(folder)
    spawned = _spawn(step_s, text.tokenizer.vocab_size)
    arguments = EngineArguments(folder=str(folder), settings=EngineSettings())
    service = EngineService(arguments, environment=os.environ, spawned=spawned)
    runner = make_runner(make_app(service, text, HttpConfig((NAME,))))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    garbage.tune_for_serving()
    print(runner.addresses[0][1], flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)  # until the client closes it
    finally:
        await runner.cleanup()


# ---- the client


class StreamConnection(asyncio.Protocol):
    """One connection that sends the next request when the last stream has ended."""

    def __init__(self, bodies: list[bytes], path: str, step_s: float, done: asyncio.Future[None]) -> None:
        self._bodies = bodies
        self._path = path
        self._step_s = step_s
        self._done = done
        self._tail = b""
        self.num_tokens = 0
        self.delays_s: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._next()

    def _next(self) -> None:
        if not self._bodies:
            self._done.set_result(None)
            self._transport.close()
            return
        body = self._bodies.pop()
        head = f"POST {self._path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self.delays_s.append(time.monotonic() % self._step_s)
        self.num_tokens += data.count(b"data: {")
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END:
            self._next()


def _bodies(text: ModelText, stream: int, num: int, chat: bool, max_tokens: int) -> list[bytes]:
    rng = random.Random(stream)
    vocabulary = text.tokenizer
    made = []
    for _ in range(num):
        prompt = vocabulary.decode([rng.randrange(1000, vocabulary.vocab_size) for _ in range(TOKENS_IN)])
        words: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        fixed = {"model": NAME, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        made.append(json.dumps(words | fixed).encode())
    return made


def _same(stream: StreamConnection) -> StreamConnection:
    return stream


async def load(port: int, bodies: list[list[bytes]], path: str, step_s: float) -> list[StreamConnection]:
    loop = asyncio.get_running_loop()
    streams, ends = [], []
    for own in bodies:
        ends.append(loop.create_future())
        stream = StreamConnection(own, path, step_s, ends[-1])
        streams.append(stream)
        await loop.create_connection(partial(_same, stream), "127.0.0.1", port)
    await asyncio.gather(*ends)
    return streams


def cpu_s(pid: int) -> tuple[float, float]:
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return int(fields[11]) * tick_s, int(fields[12]) * tick_s


def measure(args: argparse.Namespace) -> dict[str, float]:
    step_s = args.step_ms / 1e3
    text = ModelText.from_folder(args.model)
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    command = python_module(_MODULE, "server", args.model, step_s)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        warm = [_bodies(text, -1 - i, 1, args.chat, WARMUP_TOKENS) for i in range(args.streams)]
        uvloop.run(load(port, warm, path, step_s))
        bodies = [_bodies(text, i, args.rounds, args.chat, TOKENS_OUT) for i in range(args.streams)]
        before = cpu_s(server.pid)
        streams = uvloop.run(load(port, bodies, path, step_s))
        after = cpu_s(server.pid)
        server.stdin.close()
    num_tokens = args.streams * args.rounds * TOKENS_OUT
    user_us, system_us = ((b - a) / num_tokens * 1e6 for a, b in zip(before, after, strict=True))
    cuts = quantiles([delay_s * 1e3 for stream in streams for delay_s in stream.delays_s], n=100)
    return {
        "streams": args.streams,
        "tokens": num_tokens,
        "events": sum(stream.num_tokens for stream in streams),
        "us_per_token": round(user_us + system_us, 2),
        "user_us": round(user_us, 2),
        "system_us": round(system_us, 2),
        "delay_p50_ms": round(cuts[49], 3),
        "delay_p99_ms": round(cuts[98], 3),
    }


def main() -> None:
    logs.set_up("warning")
    role, *arguments = sys.argv[1:]
    if role == "engine":
        play_engine(int(arguments[0]), float(arguments[1]), int(arguments[2]))
    else:
        uvloop.run(serve(Path(arguments[0]), float(arguments[1])))


if __name__ == "__main__":
    main()
