"""Agent sessions through a router, over mock workers with real LRU prefix caches.

    python -m bench.support.placement_load workers PORT [PORT ...]
    python -m bench.support.placement_load drive --url http://127.0.0.1:PORT --ports PORT [PORT ...] --case A2 --seed 7

`workers` runs one mock worker on each port. `drive` plays 64 sessions of 6 to 18 turns, at most 32 requests at a time,
and prints one JSON object: the hit ratio and the skew as the workers counted them, so a router cannot report better
numbers than it has. Both need aiohttp.

A worker keeps the prompt's blocks of 256 characters in an LRU cache. A request takes 10 ms and 0.4 ms for each block
that was not cached. The same seed gives the same sessions; `placement_simulation` relies on this order of random
numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from bench.support.processes import environment, python_module

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

MODEL = "mock"
BLOCK_CHARS = 256
NUM_SESSIONS, TURNS, MOST_IN_FLIGHT = 64, (6, 18), 32
BASE_S, MISSED_BLOCK_S = 0.01, 0.0004
PAUSE_S = (0.05, 0.4)
ALPHABET = "abcdefgh ijkl"
_ERROR_CHARS = 400
SYSTEM_HEAD = "You are an agent. "


@dataclass(frozen=True)
class PlacementCase:
    system_chars: int  # the system prompt that all sessions share
    turn_chars: tuple[int, int]  # what a turn adds
    cache_blocks: int  # of each worker
    stagger_s: float  # between the starts of two sessions


CASES = {
    "A1": PlacementCase(16_000, (1_500, 7_000), 3_600, 0.0),
    "A2": PlacementCase(64_000, (400, 2_500), 6_000, 0.0),
    "A3": PlacementCase(64_000, (400, 2_500), 6_000, 0.15),
}


class CachingWorker:
    """A mock worker. It answers with what it found in its cache."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reset(1)

    def reset(self, cache_blocks: int) -> None:
        self._cache_blocks = cache_blocks
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._num_requests = 0

    def look_up(self, text: str) -> tuple[int, int]:
        """Return how many leading blocks were cached, and how many there are; then cache all of them."""
        keys, key = [], b""
        for at in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
            key = blake2b(key + text[at : at + BLOCK_CHARS].encode(), digest_size=8).digest()
            keys.append(key)
        return self.touch(keys)[0], len(keys)

    def touch(self, keys: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Cache these blocks. Return how many leading ones were cached before, and the blocks that were evicted."""
        num_found = next((at for at, key in enumerate(keys) if key not in self._cache), len(keys))
        for key in keys:
            self._cache[key] = None
            self._cache.move_to_end(key)
        evicted = []
        while len(self._cache) > self._cache_blocks:
            evicted.append(self._cache.popitem(last=False)[0])
        return num_found, evicted

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def num_free(self) -> int:
        return max(0, self._cache_blocks - len(self._cache))

    async def start(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=1 << 26)
        self.routes(app)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port).start()

    def routes(self, app: web.Application) -> None:
        from aiohttp import web

        info = {"model_id": MODEL, "model_path": MODEL, "served_model_name": MODEL, "is_generation": True}
        info_fields: dict[str, Any] = {**info, "tp_size": 1, "dp_size": 1, "max_running_requests": 64}
        model = {"id": MODEL, "object": "model", "owned_by": "bench", "max_model_len": 200_000}

        async def get_info(_: web.Request) -> web.Response:
            return web.json_response(info_fields)

        async def get_models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [model]})

        async def get_requests(_: web.Request) -> web.Response:
            return web.json_response({"requests": self._num_requests})

        async def post_reset(request: web.Request) -> web.Response:
            self.reset(int(request.query["cache_blocks"]))
            return web.json_response({})

        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", get_models)
        app.router.add_get("/requests", get_requests)
        app.router.add_post("/reset", post_reset)
        for path in ("/health", "/ready", "/get_server_info", "/server_info", "/get_model_info", "/model_info"):
            app.router.add_get(path, get_info)

    async def answer(self, request: web.Request, messages: list[dict[str, Any]]) -> tuple[int, int]:
        """Compute an answer. Return how many leading blocks of the prompt were cached, and how many there are."""
        num_found, num_blocks = self.look_up("".join(one["role"] + (one["content"] or "") for one in messages))
        await self.compute(num_blocks - num_found)
        return num_found, num_blocks

    async def compute(self, num_missed: int) -> None:
        await asyncio.sleep(BASE_S + MISSED_BLOCK_S * num_missed)

    async def _chat(self, request: web.Request) -> web.Response:
        from aiohttp import web

        body = await request.json()
        self._num_requests += 1
        num_found, num_blocks = await self.answer(request, body["messages"])
        seen = json.dumps({"worker": self._port, "found": num_found, "blocks": num_blocks})
        choice = {"index": 0, "message": {"role": "assistant", "content": seen}, "finish_reason": "stop"}
        prompt_tokens = num_blocks * BLOCK_CHARS // 4
        details = {"cached_tokens": num_found * BLOCK_CHARS // 4}
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1}
        answer = {"id": MODEL, "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
        return web.json_response({**answer, "usage": {**usage, "prompt_tokens_details": details}})


async def run_workers(ports: Sequence[int]) -> None:
    for port in ports:
        await CachingWorker(port).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


@dataclass
class Seen:
    found: int = 0
    blocks: int = 0
    follow_ups: int = 0
    on_same_worker: int = 0
    latencies_s: list[float] = field(default_factory=list)


class AgentSessions:
    """All sessions of one case, played through a router."""

    def __init__(self, url: str, case: str, seed: int, session_header: str | None, model: str) -> None:
        self._url, self._case, self._seed = url, CASES[case], seed
        self._session_header, self._model = session_header, model
        letters = random.Random(seed).choices(ALPHABET, k=self._case.system_chars)
        self._system = SYSTEM_HEAD + "".join(letters)
        self._slots = asyncio.Semaphore(MOST_IN_FLIGHT)
        self.seen = Seen()

    async def play(self, http: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(self._session(http, index) for index in range(NUM_SESSIONS)))

    async def _session(self, http: aiohttp.ClientSession, index: int) -> None:
        rng = random.Random(self._seed * 1000 + index)
        headers = {self._session_header: f"session-{index}"} if self._session_header else {}
        messages = [{"role": "system", "content": self._system}]
        worker: int | None = None
        num_turns = rng.randint(*TURNS)
        await asyncio.sleep(index * self._case.stagger_s)
        for turn in range(num_turns):
            text = "".join(rng.choices(ALPHABET, k=rng.randint(*self._case.turn_chars)))
            messages.append({"role": "user", "content": f"s{index}t{turn} {text}"})
            worker = await self._turn(http, messages, headers, worker)
            messages.append({"role": "assistant", "content": "ok"})
            await asyncio.sleep(rng.uniform(*PAUSE_S))

    async def _turn(
        self, http: aiohttp.ClientSession, messages: list[dict[str, str]], headers: dict[str, str], last: int | None
    ) -> int:
        """Send one turn; return the port of the worker that answered it."""
        body = {"model": self._model, "messages": messages, "max_tokens": 1}
        async with self._slots:
            sent_s = time.perf_counter()
            async with http.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
                if response.status != 200:
                    raise RuntimeError(f"the router answered {response.status}: {(await response.text())[:300]}")
                answer = await response.json()
            self.seen.latencies_s.append(time.perf_counter() - sent_s)
        told = json.loads(answer["choices"][0]["message"]["content"])
        self.seen.found += told["found"]
        self.seen.blocks += told["blocks"]
        if last is not None:
            self.seen.follow_ups += 1
            self.seen.on_same_worker += told["worker"] == last
        return int(told["worker"])


async def drive(
    url: str, ports: Sequence[int], case: str, seed: int, session_header: str | None, model: str
) -> dict[str, Any]:
    import aiohttp

    sessions = AgentSessions(url, case, seed, session_header, model)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        for port in ports:
            async with http.post(f"http://127.0.0.1:{port}/reset?cache_blocks={CASES[case].cache_blocks}") as response:
                await response.read()
        await sessions.play(http)
        counts = []
        for port in ports:
            async with http.get(f"http://127.0.0.1:{port}/requests") as response:
                counts.append((await response.json())["requests"])
    seen = sessions.seen
    latencies = sorted(seen.latencies_s)
    return {
        "case": case,
        "seed": seed,
        "requests": len(latencies),
        "hit": round(seen.found / seen.blocks, 4),
        "same": round(seen.on_same_worker / seen.follow_ups, 4),
        "skew": round(max(counts) * len(counts) / sum(counts), 3),
        "requests_per_worker": counts,
        "p50_ms": round(latencies[len(latencies) // 2] * 1e3, 1),
        "p95_ms": round(latencies[int(0.95 * len(latencies))] * 1e3, 1),
    }


def played(url: str, ports: Sequence[int], case: str, seed: int, session_header: str | None = None) -> dict[str, Any]:
    """Run `drive` in a process of its own. Return what it found, or its error under "error"."""
    command = python_module("bench.support.placement_load", "drive", "--url", url, "--case", case, "--seed", seed)
    command += ["--ports", *map(str, ports)]
    if session_header:
        command += ["--session-header", session_header]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), check=False)
    if done.returncode:
        return {"error": done.stderr[-_ERROR_CHARS:]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    workers = commands.add_parser("workers")
    workers.add_argument("ports", type=int, nargs="+")
    driver = commands.add_parser("drive")
    driver.add_argument("--url", required=True)
    driver.add_argument("--ports", type=int, nargs="+", required=True)
    driver.add_argument("--case", choices=CASES, default="A2")
    driver.add_argument("--seed", type=int, default=7)
    driver.add_argument("--session-header")
    driver.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    if args.command == "workers":
        asyncio.run(run_workers(args.ports))
    else:
        made = drive(args.url, args.ports, args.case, args.seed, args.session_header, args.model)
        print(json.dumps(asyncio.run(made)))


if __name__ == "__main__":
    main()
