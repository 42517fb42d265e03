"""Measure several engines one after the other, each in a process of its own.

A process keeps its GPU memory until it ends, so two engines cannot share one. All processes are started at once and import
their packages, which takes vLLM about 20 s; then each waits for a line on its standard input. So only one of them uses
the GPU at a time, and nothing else runs while it is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.processes import environment, python_module, stop_group

_GRACE_S = 10.0  # from a child's results to its end
IMPORTED = "imported"  # what a child prints before it waits


@dataclass(frozen=True, slots=True)
class EngineChild:
    """One engine with one model."""

    name: str  # of its files in the log folder
    arguments: Sequence[str]  # of `python -m bench run`
    environment: Mapping[str, str]


def wait_for_turn() -> None:
    """Called by a child after its imports: wait for its turn."""
    print(IMPORTED, flush=True)
    if not sys.stdin.readline():
        sys.exit("bench: the parent process has ended")


def measure_in_turn(
    children: Sequence[EngineChild], log_dir: Path, timeout_s: float, limit_s: float
) -> dict[str, dict[str, Any]]:
    """Return the details of each child by its name. A child that fails, or that exceeds `timeout_s`, is reported and left
    out. All children together get `limit_s`.
    """
    end_s = time.monotonic() + limit_s
    log_dir.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        started = [stack.enter_context(_started(child, log_dir)) for child in children]
        for child, process in zip(children, started, strict=True):
            _wait_until_imported(process, log_dir / f"{child.name}.log", timeout_s)
        for child, process in zip(children, started, strict=True):
            begin_s = time.monotonic()
            details = _details_path(child, log_dir)
            _let_run(process, details, min(timeout_s, end_s - begin_s))
            stop_group(process)  # with the processes it started: they hold GPU memory
            try:
                found[child.name] = json.loads(details.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                print(f"{child.name} failed: {error!r}\n{_tail(log_dir / f'{child.name}.log')}", flush=True)
            print(f"{child.name}: {time.monotonic() - begin_s:.0f} s in all", flush=True)
    return found


@contextmanager
def _started(child: EngineChild, log_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    details = _details_path(child, log_dir)
    details.unlink(missing_ok=True)
    command = python_module("bench", "run", *child.arguments, "--details", details)
    with (log_dir / f"{child.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**environment(), **child.environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop_group(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def _wait_until_imported(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline_s:
        if any(line == IMPORTED for line in log.read_text(encoding="utf-8", errors="replace").splitlines()):
            return
        time.sleep(0.1)


def _let_run(process: subprocess.Popen[bytes], details: Path, timeout_s: float) -> None:
    """Give the process its turn. Some engines hang when they end, so it gets little time after its results."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(b"\n")
        process.stdin.flush()
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline_s:
        if details.exists():
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2 if not details.exists() else _GRACE_S)


def _details_path(child: EngineChild, log_dir: Path) -> Path:
    return log_dir / f"{child.name}.json"


def _tail(log: Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
