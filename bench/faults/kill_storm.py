"""Random processes of a fleet are killed under load, the gateway included; every answer and every ledger row is checked.

    python -m bench run kill_storm --kills 200 --seed 1     about 25 minutes on two cores
    python -m bench run kill_storm --kills 6                about 40 seconds

`stoker up` runs a gateway, a prefill, a decode and a unified worker with a tiny random model in float64, so that an answer does
not depend on its batch. Each request of a set is first answered once without disturbance. Then clients stream and do not
stream these requests, while the storm sends SIGKILL to a random process at a random moment: the gateway, a worker's server, its
engine, or now and then `stoker up` itself, which the storm starts again. Some processes get SIGSTOP for a few seconds
instead. After each of them the fleet must be ready again within a bound.

At the end: every complete answer equals the undisturbed one, every cut stream is the beginning of it, and every request ended
within the bound. Each complete answer has exactly one row in the ledger with the token counts that the client got, and no
request has two rows. No process, shared memory or growing process is left.
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
from bench.faults.soak import SoakAnswer, WrongAnswer, bodies, take
from bench.support.storm_fleet import Storm, StormFleet

if TYPE_CHECKING:
    import aiohttp

NAME = "kill_storm"
HELP = "answers and the ledger while random processes of a fleet are killed, the gateway included"
NEEDS = Needs(packages=("torch", "aiohttp", "msgspec", "tokenizers"))
_RETRY_S = 0.1
_MAX_GROWTH_MIB = 150.0  # of a part, from the first kill to the end


@dataclass(slots=True)
class StormRequest:
    """What the client knows about one request that reached the gateway."""

    body: int  # index in the set
    outcome: str
    answer: SoakAnswer
    stream: bool
    ended_s: float = 0.0


@dataclass(slots=True)
class StormTally:
    requests: dict[str, StormRequest] = field(default_factory=dict)  # by x-request-id
    wrong: list[str] = field(default_factory=list)
    num_refused: int = 0  # connections; the client tries again
    slowest_s: float = 0.0

    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.requests.values())


async def deliver(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], stream: bool, request_id: str, answer: SoakAnswer
) -> str:
    """Send one request and fill `answer`; return how it ended: `complete`, `cut`, or the code of a clean error."""
    from stoker.loadgen.stream import SseParser

    sent = body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    async with http.post(f"{url}/v1/chat/completions", json=sent, headers={"X-Request-Id": request_id}) as response:
        if response.status != 200:
            problem = await response.json()
            if set(problem) != {"error"} or set(problem["error"]) != {"message", "type", "param", "code"}:
                raise WrongAnswer(f"{response.status} with {problem}")
            return f"error {response.status} {problem['error']['code']}"
        if not stream:
            take(answer, await response.json(), "message")
            return "complete"
        parser, done = SseParser(), False
        async for part in response.content.iter_any():
            for data in parser.feed(part):
                if done:
                    raise WrongAnswer("an event after [DONE]")
                if data == b"[DONE]":
                    done = True
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    return f"error event {chunk['error']['code']}"
                take(answer, chunk, "delta")
        if not done:
            raise WrongAnswer("the stream ended regularly, but without [DONE]")
    return "complete"


def is_beginning(part: SoakAnswer, whole: SoakAnswer) -> bool:
    """Return True if a cut answer is a prefix of the right one."""
    return all(
        whole.choice(index)[name].startswith(choice[name])
        for index, choice in part.choices.items()
        for name in ("content", "arguments", "name")
    )


async def client(
    number: int, fleet: StormFleet, http: aiohttp.ClientSession, load: StormLoad, tally: StormTally, end: asyncio.Event
) -> None:
    import aiohttp

    rng = random.Random(f"{load.seed} {number}")
    serial = 0
    while not end.is_set():
        which, stream = rng.randrange(len(load.requests)), rng.random() < 0.6
        serial += 1
        request_id = f"storm-{number}-{serial}"
        answer = SoakAnswer()
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout(load.bound_s):
                outcome = await deliver(http, fleet.url, load.requests[which], stream, request_id, answer)
        except aiohttp.ClientConnectorError:
            tally.num_refused += 1
            await asyncio.sleep(_RETRY_S)
            continue
        except TimeoutError:
            outcome = "hang"
            tally.wrong.append(f"{request_id}: no end within {load.bound_s:g} s, body {which}, stream {stream}")
        except (aiohttp.ClientError, ConnectionError):
            outcome = "cut"
        except (WrongAnswer, json.JSONDecodeError, KeyError) as wrong:
            outcome = "wrong"
            tally.wrong.append(f"{request_id}, body {which}: {type(wrong).__name__} {wrong}")
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - begin_s)
        right = load.right[which]
        if outcome == "complete" and not answer.same_as(right):
            tally.wrong.append(f"{request_id}, body {which}, stream {stream}: {answer} is not {right}")
            outcome = "wrong"
        elif outcome != "complete" and not is_beginning(answer, right):
            tally.wrong.append(f"{request_id}, body {which}: {outcome}, and {answer} is no beginning of {right}")
            outcome = "wrong"
        tally.requests[request_id] = StormRequest(which, outcome, answer, stream, time.monotonic())
        if outcome.startswith("error"):
            await asyncio.sleep(_RETRY_S)
        await asyncio.sleep(rng.expovariate(4))


@dataclass(frozen=True, slots=True)
class StormLoad:
    requests: list[dict[str, Any]]
    right: list[SoakAnswer]
    seed: int
    bound_s: float


async def storm(args: argparse.Namespace, folder: Path) -> Report:
    import aiohttp

    from stoker.checkpoint.progress import silent
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from tests.worker.real import make_tiny_folder

    rng = random.Random(args.seed)
    tiny = make_tiny_folder(folder / "tiny", resolve_model(None, default_cache_dir(os.environ), silent).path)
    fleet = StormFleet(folder, tiny, args.mooncake)
    requests, right, tally = bodies("tiny", args.bodies, rng), [], StormTally()
    events: list[dict[str, Any]] = []
    end = asyncio.Event()
    try:
        await fleet.start()
        await fleet.wait_ready(args.ready_s)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            for number, body in enumerate(requests):
                answer = SoakAnswer()
                outcome = await deliver(http, fleet.url, body, False, f"reference-{number}", answer)
                assert outcome == "complete", outcome
                right.append(answer)
            load = StormLoad(requests, right, args.seed, args.bound_s)
            clients = [asyncio.create_task(client(n, fleet, http, load, tally, end)) for n in range(args.clients)]
            await asyncio.sleep(2.0)
            memory = fleet.memory_mib()
            trouble = Storm(fleet, rng, args.stops, args.victim)
            for number in range(args.kills):
                await asyncio.sleep(rng.uniform(0.0, 1.5))
                event = await trouble.disturb()
                event["ready_after_s"] = await fleet.wait_ready(args.ready_s)
                events.append(event)
                counts = {"kill": number + 1, **event, "outcomes": dict(tally.outcomes()), "wrong": len(tally.wrong)}
                print(json.dumps(counts), flush=True)
            await asyncio.sleep(2.0)
            growth = {part: mib - memory.get(part, mib) for part, mib in fleet.memory_mib().items()}
            end.set()
            await asyncio.gather(*clients)
        code = await fleet.stop(60.0)
    finally:
        left = await fleet.sweep()
    seen = {"events": events, "growth_mib": growth, "exit_code": code, "left": left}
    return judge(args, tally, ledger_rows(fleet.ledger), seen)


def ledger_rows(path: Path) -> dict[str, list[tuple[int, int, int]]]:
    """Return (status, prompt tokens, completion tokens) of all rows, by x-request-id."""
    rows: dict[str, list[tuple[int, int, int]]] = {}
    with contextlib.closing(sqlite3.connect(path)) as base:
        for request_id, *row in base.execute(
            "SELECT x_request_id, status, prompt_tokens, completion_tokens FROM usage"
        ):
            rows.setdefault(request_id, []).append((row[0], row[1], row[2]))
    return rows


def judge(args: argparse.Namespace, tally: StormTally, rows: dict[str, Any], seen: dict[str, Any]) -> Report:
    missing, miscounted = [], []
    doubled = [request_id for request_id in tally.requests if len(rows.get(request_id, ())) > 1]
    for request_id, request in tally.requests.items():
        if request.outcome != "complete":
            continue
        assert request.answer.usage is not None
        if not (found := rows.get(request_id)):
            missing.append(request_id)
        elif found[0][1:] != (request.answer.usage["prompt_tokens"], request.answer.usage["completion_tokens"]):
            miscounted.append(f"{request_id}: the ledger has {found[0]}, the client got {request.answer.usage}")
    outcomes = tally.outcomes()
    waits_s = sorted(event["ready_after_s"] for event in seen["events"])
    grown = {part: round(mib) for part, mib in seen["growth_mib"].items() if mib > _MAX_GROWTH_MIB}
    problems = [f"{len(tally.wrong)} answers are wrong or did not end: {tally.wrong[:3]}"] if tally.wrong else []
    problems += [f"{len(missing)} answered requests have no row: {missing[:5]}"] if missing else []
    problems += [f"{len(doubled)} requests have two rows: {doubled[:5]}"] if doubled else []
    problems += [f"{len(miscounted)} rows have other token counts: {miscounted[:3]}"] if miscounted else []
    late = [event for event in seen["events"] if event["ready_after_s"] > args.ready_s]
    problems += (
        [f"the fleet was not ready within {args.ready_s:g} s after {len(late)} kills: {late[:3]}"] if late else []
    )
    problems += [f"these parts grew by more than {_MAX_GROWTH_MIB:g} MiB: {grown}"] if grown else []
    problems += [f"left behind: {seen['left']}"] if any(seen["left"].values()) else []
    problems += [f"stoker up ended with {seen['exit_code']}"] if seen["exit_code"] != 0 else []
    case = f"{len(seen['events'])} kills, seed {args.seed}"
    errors = sum(count for outcome, count in outcomes.items() if outcome.startswith("error"))
    stops = sum(event["signal"] == "SIGSTOP" for event in seen["events"])
    gateways = sum(event["victim"] in ("gateway", "up") for event in seen["events"])
    results = [
        Result(case, "complete answers, all compared", "answers", outcomes["complete"], "higher"),
        Result(case, "wrong answers", "answers", outcomes["wrong"]),
        Result(case, "hangs", "requests", outcomes["hang"], notes=f"bound {args.bound_s:g} s"),
        Result(case, "cut answers", "answers", outcomes["cut"], notes=f"the gateway was hit {gateways} times"),
        Result(case, "clean errors", "requests", errors, notes=f"{stops} of the kills are SIGSTOP"),
        Result(case, "ledger rows missing", "rows", len(missing)),
        Result(case, "ledger rows doubled", "rows", len(doubled)),
        Result(case, "ledger rows with other counts", "rows", len(miscounted)),
        Result(case, "ready again, p50", "s", round(waits_s[len(waits_s) // 2], 2) if waits_s else 0.0),
        Result(case, "ready again, longest", "s", round(waits_s[-1], 2) if waits_s else 0.0),
        Result(case, "slowest request", "s", round(tally.slowest_s, 2)),
    ]
    details = {"seed": args.seed, "outcomes": dict(outcomes), "refused_connections": tally.num_refused, **seen}
    details |= {"wrong": tally.wrong, "missing": missing, "doubled": doubled, "miscounted": miscounted}
    return Report(results, details, problems)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of victims, moments and requests (default: %(default)s)")
    parser.add_argument("--stops", type=float, default=0.15, help="share of SIGSTOP among them (default: %(default)s)")
    parser.add_argument("--victim", action="append", metavar="PART", help="only this part, such as gateway; repeatable")
    parser.add_argument("--clients", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--bodies", type=int, default=24, help="different requests (default: %(default)s)")
    parser.add_argument("--bound-s", type=float, default=60.0, help="for each request (default: %(default)s)")
    parser.add_argument("--ready-s", type=float, default=60.0, help="for the fleet (default: %(default)s)")
    parser.add_argument("--mooncake", action="store_true", help="share KV through a Mooncake master too, and kill it")


def run(args: argparse.Namespace) -> Report:
    sys.path.insert(0, str(ROOT / "tests"))  # helpers of the tests make the tiny model
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stopped benchmark stops its fleet
    print(f"kill_storm: seed {args.seed}, {args.kills} kills", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(storm(args, Path(folder)))
