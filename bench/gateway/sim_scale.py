"""How long `stoker sim` takes, and how much memory it needs: up to a million requests on 64 workers, on one core.

A worker is the estimate of Llama-3.1-8B on one H200. Sessions of four turns share 8 system prompts of 1,024 tokens; each turn
adds about 512 tokens and has an answer of about 128, after about 5 s of think time. Every size runs in its own process, which
is measured as a whole: imports, the empty fleet, the simulation and the report. The smallest size runs a second time with
another hash seed, and both outputs must be equal, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.contract import Needs, Report, Result
from bench.support.processes import environment, python_module

NAME = "sim_scale"
HELP = "time and memory of stoker sim for up to a million requests on 64 workers"
NEEDS = Needs(packages=("msgspec",))
SESSIONS_PER_S = 1.5  # for each worker
LOAD = ("--turns", 4, "--input-tokens", 512, "--output-tokens", 128, "--spread", 0.5, "--system-tokens", 1024)
ALLOWED_S, ALLOWED_MIB = 600.0, 4096.0  # for a million requests on 64 workers; a smaller size has its part of the time
ALLOWED_GROWTH = 1.2  # of the CPU time of a request, from the second size to the largest
_MILLION = 1_000_000
_WORKERS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = [20_000, 100_000, 1_000_000]
    parser.add_argument("--requests", type=int, nargs="+", default=sizes, help="sizes (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=_WORKERS, help="unified workers (default: %(default)s)")


@dataclass(frozen=True)
class MeasuredRun:
    """One process that has simulated a load."""

    requests: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    output: bytes


def run(args: argparse.Namespace) -> Report:
    from bench.support.estimated_worker import estimated_worker
    from stoker.sim.calibration import write_calibration

    sizes = sorted(args.requests)
    report = Report(details=[])
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder, "llama8b.json")
        write_calibration(estimated_worker("llama8b", "1xH200"), calibration)
        runs = [_measured(calibration, size, args.workers, hash_seed=1) for size in sizes]
        again = _measured(calibration, sizes[0], args.workers, hash_seed=2)
    if again.output != runs[0].output:
        report.problems.append(f"two runs of {sizes[0]:,} requests with the same seed have different outputs")
    for one in (*runs, again):
        row = {"requests": one.requests, "wall_s": one.wall_s, "cpu_s": one.cpu_s, "peak_mib": one.peak_mib}
        report.details.append(row)
    for one in runs:
        case = f"{one.requests:,} requests, {args.workers} workers"
        is_largest = one is runs[-1] and args.workers == _WORKERS  # the allowed time and memory are for this fleet
        report.results += [
            _result(case, "wall time", "s", one.wall_s, ALLOWED_S * one.requests / _MILLION if is_largest else None),
            _result(case, "peak memory", "MiB", one.peak_mib, ALLOWED_MIB if is_largest else None),
            _result(case, "CPU time of a request", "us", one.cpu_s / one.requests * 1e6, None),
        ]
    if len(runs) > 1:
        first = 1 if len(runs) > 2 else 0  # the start is a part of the smallest size
        per_request = [one.cpu_s / one.requests for one in runs]
        case = f"from {sizes[first]:,} to {sizes[-1]:,} requests"
        growth = per_request[-1] / per_request[first]
        report.results.append(_result(case, "growth of the CPU time of a request", "times", growth, ALLOWED_GROWTH))
    return report


def _measured(calibration: Path, requests: int, workers: int, hash_seed: int) -> MeasuredRun:
    """Simulate a load in a process of its own, and return what it cost and printed."""
    flags = ("--calibration", calibration, "--unified", workers, "--num-requests", requests)
    rate = SESSIONS_PER_S * workers
    load = (*LOAD, "--systems", 8, "--think-s", 5, "--rate", rate, "--goal-ttft-ms", 2000, "--goal-itl-ms", 50)
    command = python_module("stoker.cli.main", "sim", *flags, *load, "--no-range", "--json")
    env = {**environment(), "PYTHONHASHSEED": str(hash_seed)}
    started_s = time.perf_counter()
    with tempfile.TemporaryFile() as output, subprocess.Popen(command, env=env, stdout=output) as process:
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:  # the runner was told to stop
            process.kill()
            raise
        wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        output.seek(0)
        found = MeasuredRun(requests, wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output.read())
    print(f"{requests:,} requests: {found.wall_s:.0f} s, CPU {found.cpu_s:.0f} s, {found.peak_mib:.0f} MiB", flush=True)
    return found


def _result(case: str, metric: str, unit: str, value: float, allowed: float | None) -> Result:
    """Return a result, beside the largest value that is allowed if there is one."""
    value = round(value, 3)
    if allowed is None:
        return Result(case, metric, unit, value)
    return Result(
        case, metric, unit, value, competitor="allowed", competitor_value=allowed, comparison="baseline", target=1.0
    )
