"""Minutes of mixed load through the gateway while workers are killed, drained and restarted; then everything is checked.

    python -m bench run soak --minutes 30

Real processes: `stoker gateway` before `stoker serve` workers with a tiny random model in float64, so that an answer does
not depend on its batch. Before the load, each request of the set is answered once by an undisturbed worker. During the
load, clients stream, do not stream, ask for several choices, forced tool calls, schemas and stop strings, read slowly, and
disconnect in the middle. Meanwhile, every few seconds, a random worker or only its engine is killed with SIGKILL, or the
worker is drained, and started again. At the end every finished answer must equal the undisturbed one, every refusal must
be a clean error, nothing may be reserved, and the ledger's token counts must be those of the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import ROOT, Needs, Report, Result
from bench.support.processes import environment, free_port, python_module

if TYPE_CHECKING:
    import aiohttp

NAME = "soak"
HELP = "answers, ledger and memory under minutes of load while workers and engines are killed"
NEEDS = Needs(packages=("torch", "aiohttp", "msgspec", "tokenizers"))
ADMIN_TOKEN = "soak-admin-token"
LEDGER = "ledger.sqlite"
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"steps": {"type": "integer"}, "fast": {"type": "boolean"}},
            "required": ["steps", "fast"],
        },
    },
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}


def bodies(model: str, num: int, rng: random.Random) -> list[dict[str, Any]]:
    """The set of requests: each has one right answer."""
    words = ["river", "stone", "lamp", "garden", "signal", "copper", "winter", "orbit", "pepper", "violin"]
    made = []
    for number in range(num):
        turns = [{"role": "system", "content": "You are a careful agent. " + " ".join(rng.choices(words, k=60))}]
        for turn in range(rng.randrange(1, 4)):
            turns.append(
                {"role": "user", "content": f"{number}.{turn} " + " ".join(rng.choices(words, k=rng.randrange(5, 80)))}
            )
            turns.append({"role": "assistant", "content": " ".join(rng.choices(words, k=10))})
        body: dict[str, Any] = {
            "model": model,
            "messages": turns[:-1],
            "max_tokens": rng.randrange(4, 48),
            "seed": number,
        }
        kind = number % 6
        if kind == 0:
            body["temperature"] = 0
        elif kind == 1:
            body |= {"n": 3, "temperature": 1.0}
        elif kind == 2:
            body |= {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "move"}}}
        elif kind == 3:
            body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}}}
        elif kind == 4:
            body |= {"stop": ["e", "zz"], "temperature": 0.9, "frequency_penalty": 0.5}
        made.append(body)
    return made


@dataclass(slots=True)
class SoakAnswer:
    """The compared parts of an answer: text, tool calls and finish reason of each choice, and the usage."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    def choice(self, index: int) -> dict[str, Any]:
        return self.choices.setdefault(index, {"content": "", "arguments": "", "name": "", "finish": None})

    def same_as(self, other: SoakAnswer) -> bool:
        counts = ("prompt_tokens", "completion_tokens")
        return self.choices == other.choices and all(self.usage[name] == other.usage[name] for name in counts)  # type: ignore[index]


def take(answer: SoakAnswer, chunk: dict[str, Any], part: str) -> None:
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    for one in chunk["choices"]:
        mine, said = answer.choice(one["index"]), one[part]
        mine["content"] += said.get("content") or ""
        for call in said.get("tool_calls") or ():
            mine["name"] += call["function"].get("name") or ""
            mine["arguments"] += call["function"].get("arguments") or ""
        mine["finish"] = one.get("finish_reason") or mine["finish"]


class WrongAnswer(Exception):
    """The gateway broke its contract."""


@dataclass(slots=True)
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished: set[str] = field(default_factory=set)
    slowest_s: float = 0.0

    def ended(self, request_id: str, answer: SoakAnswer) -> None:
        assert answer.usage is not None
        self.finished.add(request_id)
        self.prompt_tokens += answer.usage["prompt_tokens"]
        self.cached_tokens += answer.usage["prompt_tokens_details"]["cached_tokens"]
        self.completion_tokens += answer.usage["completion_tokens"]


async def send(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], how: str, request_id: str, rng: random.Random
) -> SoakAnswer | None:
    """Send one request. Return None if this client disconnected before the end."""
    import aiohttp

    from stoker.loadgen.stream import SseParser

    stream = how != "whole"
    sent = body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    leave_after = rng.randrange(0, 12) if how == "disconnect" else None
    answer = SoakAnswer()
    async with http.post(f"{url}/v1/chat/completions", json=sent, headers={"X-Request-Id": request_id}) as response:
        if response.status != 200:
            problem = await response.json()
            if set(problem) != {"error"} or set(problem["error"]) != {"message", "type", "param", "code"}:
                raise WrongAnswer(f"{response.status} with {problem}")
            raise aiohttp.ClientResponseError(
                response.request_info, (), status=response.status, message=problem["error"]["code"] or ""
            )
        if not stream:
            take(answer, await response.json(), "message")
            return answer
        parser, num, done = SseParser(), 0, False
        async for part in response.content.iter_any():
            for data in parser.feed(part):
                num += 1
                if leave_after is not None and num > leave_after:
                    return None
                if data == b"[DONE]":
                    done = True
                    continue
                chunk = json.loads(data)
                if done:
                    raise WrongAnswer("an event after [DONE]")
                if "error" in chunk:
                    raise WrongAnswer(f"an error in the stream: {chunk}")
                if {"kv_transfer_params", "token_ids", "prompt_token_ids"} & set(chunk):
                    raise WrongAnswer(f"internal fields: {sorted(chunk)}")
                take(answer, chunk, "delta")
            if how == "slow":
                await asyncio.sleep(rng.random() * 0.3)
        if not done:
            raise WrongAnswer("the stream ended without [DONE]")
    return answer


async def wait_ready(http: aiohttp.ClientSession, url: str, log: Path) -> None:
    import aiohttp

    for _ in range(600):
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{url} did not get ready: {log}")


class SoakWorker:
    def __init__(self, folder: Path, port: int, log: Path) -> None:
        self.port, self._folder, self._log = port, folder, log
        self.url = f"http://127.0.0.1:{port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = python_module("stoker.cli.main", "serve", self._folder, "--port", self.port, "--dtype", "float64")
        command += ["--served-name", "tiny", "--kv-blocks", "2000"]
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=out, stderr=out, start_new_session=True, env=environment()
            )

    async def wait_ready(self, http: aiohttp.ClientSession) -> None:
        await wait_ready(http, self.url, self._log)

    async def kill(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        await self._process.wait()

    def kill_engine(self) -> None:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError, ProcessLookupError):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill(signal.SIGTERM)


def kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


async def disturb(
    workers: list[SoakWorker], http: aiohttp.ClientSession, tally: Tally, rng: random.Random, every_s: float
) -> None:
    """Disturb one worker at a time, so that the others can continue its requests."""
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every_s)
        worker = rng.choice(workers)
        how = rng.choice(("kill", "kill", "engine", "drain"))
        tally.counts[f"worker_{how}"] += 1
        if how == "engine":
            worker.kill_engine()
        else:
            await worker.kill(signal.SIGKILL if how == "kill" else signal.SIGTERM)
            await asyncio.sleep(rng.uniform(0, 2))
            await worker.start()
        await worker.wait_ready(http)
        await asyncio.sleep(2.0)  # the gateway probes it once before the next disturbance


async def client(
    number: int,
    url: str,
    http: aiohttp.ClientSession,
    requests: list[dict[str, Any]],
    right: list[SoakAnswer],
    tally: Tally,
    end_s: float,
    seed: int,
) -> None:
    import aiohttp

    rng = random.Random(f"{seed} {number}")
    serial = 0
    while time.monotonic() < end_s:
        which = rng.randrange(len(requests))
        how = rng.choices(("stream", "whole", "slow", "disconnect"), (5, 3, 1, 1))[0]
        serial += 1
        request_id = f"soak-{number}-{serial}"
        begin_s = time.monotonic()
        try:
            answer = await send(http, url, requests[which], how, request_id, rng)
        except aiohttp.ClientResponseError as refused:
            tally.counts[f"refused {refused.status} {refused.message}"] += 1
            await asyncio.sleep(0.2)
            continue
        except (WrongAnswer, aiohttp.ClientError, TimeoutError) as wrong:
            tally.wrong.append(f"{request_id} {how} body {which}: {type(wrong).__name__} {wrong}")
            continue
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - begin_s)
        if answer is None:
            tally.counts["disconnected"] += 1
        elif answer.same_as(right[which]):
            tally.counts[f"right {how}"] += 1
            tally.ended(request_id, answer)
        else:
            tally.wrong.append(f"{request_id} {how} body {which}: {answer} is not {right[which]}")
        await asyncio.sleep(rng.expovariate(5))


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def in_flight(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(f"{url}/admin/ledger", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}) as response:
        found: dict[str, Any] = await response.json()
        return found


def ledger_totals(path: Path, ids: set[str]) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(path)) as base:
        columns = "x_request_id, prompt_tokens, cached_tokens, completion_tokens"
        rows = base.execute(f"SELECT {columns} FROM usage").fetchall()
    mine = [row for row in rows if row[0] in ids]
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    return {"rows": len(mine), "all_rows": len(rows)} | {
        name: sum(row[at + 1] for row in mine) for at, name in enumerate(names)
    }


async def start_gateway(
    stack: contextlib.AsyncExitStack, http: aiohttp.ClientSession, workers: list[SoakWorker], folder: Path
) -> tuple[str, asyncio.subprocess.Process]:
    port = free_port()
    (folder / "admin").write_text(ADMIN_TOKEN)
    command = python_module("stoker.cli.main", "gateway", "--port", port)
    command += ["--admin-token-file", str(folder / "admin"), "--store", str(folder / LEDGER)]
    for worker in workers:
        command += ["--worker", worker.url]
    log = folder / "gateway.log"
    with log.open("ab") as out:
        gateway = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, start_new_session=True, env=environment()
        )
    stack.callback(kill, gateway)
    url = f"http://127.0.0.1:{port}"
    await wait_ready(http, url, log)
    return url, gateway


async def under_load(
    args: argparse.Namespace, clients: list[asyncio.Task[None]], trouble: asyncio.Task[None], tally: Tally, pid: int
) -> list[float]:
    """Wait until all clients have ended; return the gateway's memory at each report."""
    memory: list[float] = []
    while not all(one.done() for one in clients):
        await asyncio.wait(clients, timeout=args.report_s)
        if trouble.done():
            trouble.result()
        memory.append(round(rss_mib(pid), 1))
        report = {"counts": dict(tally.counts), "wrong": len(tally.wrong), "gateway_rss_mib": memory[-1]}
        print(json.dumps(report), flush=True)
    trouble.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await trouble
    return memory


async def soak(args: argparse.Namespace, folder: Path) -> Report:
    import aiohttp

    from stoker.checkpoint.progress import silent
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from tests.worker.real import make_tiny_folder

    rng = random.Random(args.seed)
    tiny = make_tiny_folder(folder / "tiny", resolve_model(None, default_cache_dir(os.environ), silent).path)
    workers = [SoakWorker(tiny, free_port(), folder / f"worker{number}.log") for number in range(args.workers)]
    requests, tally = bodies("tiny", args.bodies, rng), Tally()
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        contextlib.AsyncExitStack() as stack,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        for worker in workers:
            stack.push_async_callback(worker.stop)
            await worker.start()
        for worker in workers:
            await worker.wait_ready(http)
        right = []
        for body in requests:
            answer = await send(http, workers[0].url, body, "whole", "first", rng)
            assert answer is not None
            right.append(answer)
        url, gateway = await start_gateway(stack, http, workers, folder)
        end_s = time.monotonic() + 60 * args.minutes
        trouble = asyncio.create_task(disturb(workers, http, tally, rng, args.every_s))
        clients = [
            asyncio.create_task(client(number, url, http, requests, right, tally, end_s, args.seed))
            for number in range(args.clients)
        ]
        memory = await under_load(args, clients, trouble, tally, gateway.pid)
        await asyncio.sleep(2.0)
        left = await in_flight(http, url)
        os.kill(gateway.pid, signal.SIGTERM)
        code = await asyncio.wait_for(gateway.wait(), 30)
    seen = {"in_flight_after": left, "gateway_rss_mib": memory, "gateway_exit_code": code}
    return judge(args, tally, ledger_totals(folder / LEDGER, tally.finished), seen)


def judge(args: argparse.Namespace, tally: Tally, booked: dict[str, int], seen: dict[str, Any]) -> Report:
    """Compare what the gateway recorded with what the clients were told."""
    reported = {
        "rows": len(tally.finished),
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "completion_tokens": tally.completion_tokens,
    }
    result = {
        "minutes": args.minutes,
        "seed": args.seed,
        "counts": dict(tally.counts),
        "wrong": tally.wrong[:50],
        "num_wrong": len(tally.wrong),
        **seen,
        "reported": reported,
        "booked": booked,
        "slowest_s": round(tally.slowest_s, 1),
    }
    left = seen["in_flight_after"]
    is_left = any([*left["reserved"].values(), *left["admitted"].values(), left["waiting"]])
    is_exact = all(booked[name] == reported[name] for name in reported)
    problems = [f"{len(tally.wrong)} answers are wrong"] if tally.wrong else []
    problems += ["reservations or waiting requests are left"] if is_left else []
    problems += ["the ledger differs from the answers"] if not is_exact else []
    problems += [f"the gateway ended with {seen['gateway_exit_code']}"] if seen["gateway_exit_code"] else []
    return Report(_results(args, tally, seen["gateway_rss_mib"], is_exact), result, problems)


def _results(args: argparse.Namespace, tally: Tally, memory_mib: list[float], is_exact: bool) -> list[Result]:
    case = f"{args.minutes:g} minutes, {args.workers} workers, {args.clients} clients, seed {args.seed}"

    def count(prefix: str) -> int:
        return sum(number for name, number in tally.counts.items() if name.startswith(prefix))

    ledger = "the ledger is exact" if is_exact else "the ledger differs from the answers"
    return [
        Result(case, "workers and engines killed or drained", "times", count("worker_"), "higher"),
        Result(case, "right answers", "answers", count("right"), "higher", notes=ledger),
        Result(case, "wrong answers", "answers", len(tally.wrong)),
        Result(case, "requests refused", "requests", count("refused")),
        Result(case, "slowest answer", "s", tally.slowest_s),
        Result(case, "gateway memory at the end", "MiB", memory_mib[-1], notes=f"{memory_mib[0]} MiB at the start"),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30.0, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--bodies", type=int, default=60, help="different requests (default: %(default)s)")
    parser.add_argument("--every-s", type=float, default=8.0, help="between two disturbances (default: %(default)s)")
    parser.add_argument(
        "--report-s", type=float, default=30.0, help="between two lines of output (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    sys.path.insert(0, str(ROOT / "tests"))  # the tiny model is made by the tests' own helpers
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        return asyncio.run(soak(args, Path(folder)))
