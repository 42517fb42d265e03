"""Goodput of a fleet whose roles follow the load, compared with every fixed split of prefill and decode workers.

    python -m bench run autoscale_goodput                  8 workers, 2 phases of 40 s, about 20 minutes
    python -m bench run autoscale_goodput --split 4        only this fixed split, and the autoscaler

Eight worker processes (bench/support/sleeping_worker.py) run the real server and scheduler, and sleep for calibrated step times.
The real gateway is in front of them. Requests arrive at random times (Poisson, the same in every run). In the first phase they
have long prompts and short answers, in the second one short prompts and long answers. A request is good if its time to the first
token and its mean time between tokens are within the goals. Goodput is the good requests per second of the trace.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import Needs, Report, Result
from bench.support.processes import free_ports, python_module, started, wait_for_http, wait_for_port

NAME = "autoscale_goodput"
HELP = "goodput of roles that follow the load, compared with every fixed split"
NEEDS = Needs(packages=("aiohttp", "msgspec", "uvloop", "tokenizers"))
WORKERS = 8
TTFT_S, ITL_S = 3.0, 0.12
_TOKEN = "autoscale-goodput"
AUTOSCALE = f"""
[autoscale]
mode = "on"
ttft_s = {TTFT_S / 2}
itl_s = {ITL_S - 0.02}
interval_s = 0.5
confirm = 2
hold_s = 1.5
reverse_s = 8
warm_s = 1
min_prefill = 1
min_decode = 1
"""


@dataclass(frozen=True)
class TracePhase:
    """Requests of one kind."""

    prompt_tokens: int
    output_tokens: int
    per_s: float


PHASES = (TracePhase(6000, 32, 9.0), TracePhase(300, 300, 3.4))


@dataclass
class Outcome:
    """What one client saw."""

    phase: int
    ttft_s: float = float("inf")
    itl_s: float = float("inf")
    error: str = ""

    @property
    def is_good(self) -> bool:
        return not self.error and self.ttft_s <= TTFT_S and self.itl_s <= ITL_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--phase-s", type=float, default=40.0, help="length of each phase, default: %(default)s")
    parser.add_argument("--split", type=int, action="append", help="prefill workers of a fixed split; default: 1 to 7")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--log-dir", type=Path, default=Path("build/autoscale_goodput"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    splits = args.split or list(range(1, WORKERS))
    report = Report(details=[])
    found = {split: _run(args, split, "", report) for split in splits}
    scaled = _run(args, WORKERS // 2, AUTOSCALE, report)
    best = max(found, key=lambda split: found[split])
    case = f"{WORKERS} workers, input-heavy then output-heavy"
    for split, goodput in found.items():
        report.results.append(
            Result(f"{case}; fixed {split}P+{WORKERS - split}D", "goodput", "requests/s", goodput, "higher")
        )
    report.results.append(
        Result(
            f"{case}; autoscaler from {WORKERS // 2}P+{WORKERS // 2}D",
            "goodput",
            "requests/s",
            scaled,
            "higher",
            f"best fixed split ({best}P+{WORKERS - best}D)",
            found[best],
            "baseline",
            notes=f"good: first token within {TTFT_S:g} s, mean time between tokens within {ITL_S:g} s",
            target=1.0,
        )
    )
    if scaled <= found[best]:
        report.problems.append(
            f"the autoscaler's goodput {scaled:.2f} is not above {found[best]:.2f} of the best split"
        )
    return report


def _run(args: argparse.Namespace, num_prefill: int, config: str, report: Report) -> float:
    import uvloop

    args.log_dir.mkdir(parents=True, exist_ok=True)
    name = "autoscaled" if config else f"fixed-{num_prefill}"
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        gateway_port, *ports = free_ports(WORKERS + 1)
        roles = ["prefill" if i < num_prefill else "decode" for i in range(WORKERS)]
        for port, role in zip(ports, roles, strict=True):
            command = python_module("bench.support.sleeping_worker", port, "--role", role)
            held.enter_context(started(command, args.log_dir / f"{name}-worker.log"))
        for port in ports:
            wait_for_port(port, 60)
        (folder / "token").write_text(_TOKEN)
        (folder / "gateway.toml").write_text("[admission]\nqueue_s = 60.0\n" + config)
        command = python_module(
            "stoker.cli.main", "gateway", "--port", gateway_port, "--store", "none", "--no-request-log"
        )
        command += ["--admin-token-file", str(folder / "token"), "--config", str(folder / "gateway.toml")]
        for port, role in zip(ports, roles, strict=True):
            command += ["--worker", f"http://127.0.0.1:{port},role={role}"]
        gateway = held.enter_context(started(command, args.log_dir / f"{name}-gateway.log"))
        wait_for_http(f"http://127.0.0.1:{gateway_port}/ready", gateway, "gateway", 60)
        outcomes = uvloop.run(_load(gateway_port, args.phase_s, args.seed))
    good = [sum(one.is_good for one in outcomes if one.phase == i) for i in range(len(PHASES))]
    total = [sum(one.phase == i for one in outcomes) for i in range(len(PHASES))]
    errors = [one.error for one in outcomes if one.error]
    detail = {"run": name, "good": good, "requests": total, "errors": len(errors), "first_error": errors[:1]}
    print(json.dumps(detail), flush=True)
    report.details.append(detail)
    if config and errors:
        report.problems.append(f"{len(errors)} requests failed while roles changed: {errors[0]}")
    return sum(good) / (len(PHASES) * args.phase_s)


async def _load(port: int, phase_s: float, seed: int) -> list[Outcome]:
    """Send the trace, and return what the clients saw."""
    import asyncio

    import aiohttp

    rng = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=180)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = []
        for number, phase in enumerate(PHASES):
            left_s = phase_s
            while (pause_s := rng.expovariate(phase.per_s)) < left_s:
                left_s -= pause_s
                await asyncio.sleep(pause_s)
                prompt = [rng.randrange(97, 123) for _ in range(phase.prompt_tokens)]
                tasks.append(asyncio.create_task(_ask(session, port, number, phase, prompt)))
            await asyncio.sleep(left_s)
        return list(await asyncio.gather(*tasks))


async def _ask(session: Any, port: int, number: int, phase: TracePhase, prompt: list[int]) -> Outcome:
    import time

    import aiohttp

    body = {
        "model": "sleeping",
        "prompt": prompt,
        "max_tokens": phase.output_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    outcome, sent_s, first_s, num_tokens, is_done = Outcome(number), time.monotonic(), 0.0, 0, False
    try:
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
            if answer.status != 200:
                outcome.error = f"status {answer.status}: {(await answer.text())[:200]}"
                return outcome
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                elif line.startswith(b"data: "):
                    if b'"error"' in line:
                        outcome.error = line.decode()[:200]
                        return outcome
                    num_tokens += 1
                    first_s = first_s or time.monotonic()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        outcome.error = repr(error)
        return outcome
    if not is_done:
        outcome.error = "the stream has no end"
        return outcome
    outcome.ttft_s = first_s - sent_s
    outcome.itl_s = (time.monotonic() - first_s) / max(1, num_tokens - 1)
    return outcome
