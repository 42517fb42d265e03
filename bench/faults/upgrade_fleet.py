"""Upgrade a loaded fleet with `stoker upgrade`: failed requests, and how soon the hit ratio is back.

    python -m bench run upgrade_fleet                       two workers with SmolLM2, up to 5 minutes
    python -m bench run upgrade_fleet --model FOLDER

Two workers share a KV tier on disk and are behind a gateway. Agents send sessions without an end: each turn resends the whole
conversation. When every cache is warm, `stoker upgrade` restarts one worker after the other under this load. The hit ratio before
is that of the last window before the upgrade. The hit ratio after is that of the windows that begin when the upgrade has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import BenchmarkError, Needs, Report, Result
from bench.support.agent_load import AgentLoad, AgentProfile, agent_sessions
from bench.support.processes import environment, free_ports, python_module, started, wait_for_http

if TYPE_CHECKING:
    from stoker.loadgen.session import LoadSession
    from stoker.loadgen.stream import Record

NAME = "upgrade_fleet"
HELP = "failed requests and hit ratio while `stoker upgrade` restarts a loaded fleet"
NEEDS = Needs(packages=("torch", "aiohttp", "msgspec"))
_TOKEN = "a-token-for-upgrade-fleet"
_BACK_S = 60.0  # the target: the hit ratio is back within this time
_POINTS = 0.01
_UPGRADE_S = 150.0
_SESSIONS = 400  # more than a run needs
_PROFILE = AgentProfile(
    head_tokens=250, task_tokens=(8, 30), tool_tokens=(20, 60), answer_tokens=(4, 12), think_s=(0.5, 1.5), turns=(8, 12),
    context_tokens=2048, ramp_s=0.0,
)  # fmt: skip


@dataclass
class Load:
    """Agents that begin a new session when the last one has ended, until they are stopped."""

    records: list[Record] = field(default_factory=list)
    stopping: bool = False

    async def run(self, client: Any, sessions: Iterator[LoadSession], options: dict[str, Any]) -> None:
        for session in sessions:
            answers: list[str] = []
            for turn in session.turns:
                await asyncio.sleep(turn.pause_s)
                if self.stopping:
                    return
                record = await client.send(turn, options, answers, None)
                answers.append(record.text)
                self.records.append(record)
        raise BenchmarkError(f"the {_SESSIONS} sessions have ended before the run; give fewer --agents")

    def window(self, begin_s: float, end_s: float) -> list[Record]:
        return [one for one in self.records if begin_s <= one.started_s < end_s and one.error is None]

    def hit_ratio(self, begin_s: float, end_s: float) -> float:
        found = self.window(begin_s, end_s)
        prompt = sum(one.prompt_tokens for one in found)
        return sum(one.cached_tokens or 0 for one in found) / prompt if prompt else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agents", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--model", default="", help="default: SmolLM2")
    parser.add_argument("--warm-s", type=float, default=30.0, help="load before the measurement (default: %(default)g)")
    parser.add_argument("--window-s", type=float, default=30.0, help="of the hit ratios (default: %(default)g)")
    parser.add_argument("--watch-s", type=float, default=5.0, help="of stoker upgrade (default: %(default)g)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/upgrade_fleet"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as name, _fleet(args, Path(name)) as (url, restart):
        return asyncio.run(_measure(args, url, Path(name) / "token", restart))


@contextmanager
def _fleet(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """Start workers and gateway. Yield the gateway's address and the command that restarts a worker."""
    (folder / "token").write_text(_TOKEN)
    gateway_port, *ports = free_ports(3)
    url = f"http://127.0.0.1:{gateway_port}"
    log_dir = args.log_dir.resolve()
    with ExitStack() as held:
        runner = python_module("bench.faults.upgrade_fleet", folder)
        for port in ports:
            options = ["--port", str(port), "--threads", "1", "--served-name", "m", "--drain-s", "60"]
            options += ["--kv-disk", str(folder / "kv"), "--kv-disk-gib", "1", "--drafter", "off"]
            command = python_module("stoker.cli.main", "serve", *([args.model] if args.model else []), *options)
            keeper = held.enter_context(started([*runner, str(port), *command], log_dir / f"worker-{port}.log"))
            wait_for_http(f"http://127.0.0.1:{port}/ready", keeper, "worker", 120)
        command = python_module("stoker.cli.main", "gateway", "--port", gateway_port, "--store", "none")
        command += ["--admin-token-file", str(folder / "token")]
        for port in ports:
            command += ["--worker", f"http://127.0.0.1:{port}"]
        gateway = held.enter_context(started(command, log_dir / "gateway.log"))
        wait_for_http(f"{url}/ready", gateway, "gateway", 60)
        yield url, f"{sys.executable} -m bench.faults.upgrade_fleet {folder} {{port}}"


async def _measure(args: argparse.Namespace, url: str, token: Path, restart: str) -> Report:
    from stoker.base.clock import RealClock
    from stoker.loadgen.client import Client, Target

    clock, load = RealClock(), Load()
    sessions = iter(agent_sessions(AgentLoad("upgrade", _SESSIONS), _PROFILE, seed=1))
    options = {"model": "m", "temperature": 0.0, "ignore_eos": True}
    async with Client(Target(url, session_header=True), clock) as client, asyncio.TaskGroup() as agents:
        for _ in range(args.agents):
            agents.create_task(load.run(client, sessions, options))
        try:
            await asyncio.sleep(args.warm_s + args.window_s)
            began_s = clock.now()
            status, output = await _upgrade(args, url, token, restart)
            ended_s = clock.now()
            back_s = None
            before = load.hit_ratio(began_s - args.window_s, began_s)
            # The window slides by a second: it is back when a whole window is within the target.
            while back_s is None and clock.now() < ended_s + _BACK_S + args.window_s:
                await asyncio.sleep(1.0)
                since_s = clock.now() - args.window_s
                if since_s >= ended_s and load.hit_ratio(since_s, clock.now()) >= before - _POINTS:
                    back_s = since_s - ended_s
            after_s = clock.now() - args.window_s
            after = load.hit_ratio(after_s, clock.now())
        finally:
            load.stopping = True
    during = load.hit_ratio(began_s, ended_s)
    return _judge(args, load, (before, during, after), ended_s - began_s, back_s, status, output)


async def _upgrade(args: argparse.Namespace, url: str, token: Path, restart: str) -> tuple[int, str]:
    command = python_module(
        "stoker.cli.main", "upgrade", "--url", url, "--admin-token-file", token, "--watch-s", args.watch_s,
        "--drain-s", "60", "--ready-s", "120", "--restart", restart,
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment()
    )
    try:
        async with asyncio.timeout(_UPGRADE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise BenchmarkError(f"stoker upgrade has not ended after {_UPGRADE_S:g} s") from None
    print(output.decode(), flush=True)
    return process.returncode or 0, output.decode()


def _judge(
    args: argparse.Namespace,
    load: Load,
    ratios: Sequence[float],
    took_s: float,
    back_s: float | None,
    status: int,
    output: str,
) -> Report:
    failed = [one for one in load.records if one.error is not None]
    before, during, after = (round(100 * one, 2) for one in ratios)
    model = Path(args.model).name + " model" if args.model else "SmolLM2"
    case = f"2 workers, {model}, {args.agents} agents, KV tier on disk"
    report = Report(
        [
            Result(case, "failed requests", "requests", len(failed), notes=f"of {len(load.records)}"),
            Result(case, "hit ratio before the upgrade", "%", before, "higher"),
            Result(case, "hit ratio during the upgrade", "%", during, "higher"),
            Result(case, "hit ratio after the upgrade", "%", after, "higher", notes=f"in {args.window_s:g} s"),
            Result(case, "duration of the upgrade", "s", round(took_s, 1), notes="both workers"),
        ]
    )
    if back_s is None:
        report.problems.append(
            f"the hit ratio was {before} % and is {after} %, more than 1 point less, {_BACK_S:g} s later"
        )
    else:
        note = f"target {_BACK_S:g} s; begin of the first window within 1 point"
        report.results.append(Result(case, "hit ratio is back after", "s", round(back_s, 1), notes=note))
    if failed:
        kinds = sorted({f"{one.error}: {one.error_message[:100]}" for one in failed})
        report.problems.append(f"{len(failed)} requests failed: {kinds[:5]}")
    if status:
        report.problems.append(f"stoker upgrade ended with {status}: {output.strip()[-300:]}")
    return report


# ---- the restart of a worker


def _keep(folder: Path, port: str, command: Sequence[str]) -> None:
    """Run a worker, and start it again when it has ended, as systemd does."""
    import subprocess

    while True:
        worker = subprocess.Popen(command)
        (folder / f"{port}.new").write_text(str(worker.pid))
        (folder / f"{port}.new").replace(folder / f"{port}.pid")
        worker.wait()
        time.sleep(0.2)


def _restart(folder: Path, port: str) -> None:
    """End a worker as `systemctl restart` does, and return when the old process has ended."""
    import signal

    pid = int((folder / f"{port}.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + 90
    while int((folder / f"{port}.pid").read_text()) == pid:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the worker {pid} has not ended")
        time.sleep(0.1)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        _keep(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    else:
        _restart(Path(sys.argv[1]), sys.argv[2])
