"""Time from the start of `stoker serve` to its first token on a GPU, and its stages.

`first` starts with an empty cache of compiled kernels, `warm` with a filled one and the weights in the page cache, `cold`
with the weights on the drive alone; for the last one, the drive's own time for these bytes is measured too, read
directly by 8 threads. `restart` kills the engine process of a running server, whose spare engine process takes over.
DIR is a model folder with weights, such as `make-model --weights` writes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shlex
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.contract import BenchmarkError, Needs, Report, Result
from bench.support.gpu_server import GpuServer

NAME = "start_time"
HELP = "time to the first token on a GPU: after a first, warm or cold start, and after the engine's death"
NEEDS = Needs(gpu=True, packages=("torch", "msgspec", "aiohttp", "uvloop"))
KINDS = ("first", "warm", "cold", "restart")
_PIECE_BYTES = 32 << 20
_SPARE_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a model folder with weights")
    parser.add_argument("--kinds", default=",".join(KINDS), help="starts to measure (default: %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "stoker-start-cache", help="default: %(default)s"
    )
    parser.add_argument("--context", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--serve", default="", help="more arguments of the server, as one string")


def run(args: argparse.Namespace) -> Report:
    files = sorted(args.folder.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    report = Report(details={"bytes": num_bytes})
    for kind in args.kinds.split(","):
        if kind == "first":
            shutil.rmtree(args.cache, ignore_errors=True)
        notes = ""
        if kind == "cold":
            drop_from_page_cache(files)
            rate = report.details["drive_bytes_per_s"] = drive_bytes_per_s(files)
            notes = f"the drive needs {num_bytes / rate:.1f} s for the weights ({rate / 1e9:.2f} GB/s)"
            drop_from_page_cache(files)
        arguments = ["--cache-dir", str(args.cache), *shlex.split(args.serve)]
        found = report.details[kind] = start(args.folder, args.context, arguments, kills_engine=kind == "restart")
        _show(kind, found)
        what = "restart by the spare engine" if kind == "restart" else f"{kind} start"
        case = f"{args.folder.name}, {what}"
        report.results.append(Result(case, "start to first token", "s", found["first_token_s"], notes=notes))
    return report


def start(folder: Path, context: int, arguments: list[str], *, kills_engine: bool = False) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        server = GpuServer("stoker", folder, context, arguments, log)
        try:
            seconds = server.first_token_s()
            if kills_engine:
                kill_engine(server, log)
                seconds = server.first_token_s()
        finally:
            server.stop()
        lines = log_lines(log)
    died = [number for number, line in enumerate(lines) if line["event"] == "engine_died"]
    lines = lines[died[0] + 1 :] if kills_engine else lines
    stages = [(line["stage"], line["start_s"], line["seconds"]) for line in lines if line["event"] == "timeline"]
    memory = [(line["line"], line["planned_mib"], line["used_mib"]) for line in lines if line["event"] == "memory"]
    return {
        "first_token_s": seconds,
        "untimed_s": seconds - covered_s([stage for stage in stages if stage[0] != "server: engine"], seconds),
        "timeline": sorted(stages, key=lambda stage: stage[1]),
        "memory": memory,
        "kernels": [line for line in lines if line["event"] == "kernels"],
        "warnings": [line for line in lines if line["level"] != "info"],
    }


def log_lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def kill_engine(server: GpuServer, log: Path) -> None:
    """Kill the engine process once the spare is ready, and measure from then on."""
    end_s = time.time() + _SPARE_S
    while not (spares := [line["pid"] for line in log_lines(log) if line["event"] == "spare_engine_ready"]):
        if time.time() > end_s:
            raise BenchmarkError(f"there was no spare engine after {_SPARE_S:g} s")
        time.sleep(0.1)
    engines = [pid for pid in server.children() if pid not in spares]
    server.started_s = time.time()
    for pid in engines:
        os.kill(pid, signal.SIGKILL)


def covered_s(stages: list[tuple[str, float, float]], end_s: float) -> float:
    """How much of the time until `end_s` some stage covers. Stages overlap."""
    covered = reached = 0.0
    for _name, start_s, seconds in sorted(stages, key=lambda stage: stage[1]):
        stop_s = min(start_s + seconds, end_s)
        covered += max(0.0, stop_s - max(reached, start_s))
        reached = max(reached, stop_s)
    return covered


def drop_from_page_cache(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def drive_bytes_per_s(files: list[Path]) -> float:
    """Rate of direct reads by 8 threads."""

    def read(piece: tuple[Path, int]) -> int:
        fd = os.open(piece[0], os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(fd, [mmap.mmap(-1, _PIECE_BYTES)], piece[1])
        finally:
            os.close(fd)

    pieces = [(file, offset) for file in files for offset in range(0, file.stat().st_size, _PIECE_BYTES)]
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        num_bytes = sum(threads.map(read, pieces))
    return num_bytes / (time.perf_counter() - begin_s)


def _show(kind: str, found: dict[str, Any]) -> None:
    print(f"{kind}: first token after {found['first_token_s']:.2f} s", flush=True)
    for name, start_s, seconds in found["timeline"]:
        print(f"  {start_s:7.2f} + {seconds:6.2f} s  {name}", flush=True)
    print(f"  {found['untimed_s']:16.2f} s  in no stage", flush=True)
    for line in found["kernels"]:
        print(
            f"  kernels: {line['from_folder']} from the folder, {line['from_archive']} from an archive, {line['compiled']} compiled"
        )
    for name, planned, used in found["memory"]:
        print(f"  {name:24} {planned:8} MiB planned {used:8} used", flush=True)
    for line in found["warnings"]:
        print(f"  {line}", flush=True)
