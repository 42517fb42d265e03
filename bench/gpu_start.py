"""From the start of `stoker serve` to its first token, and what that is made of.

    python bench/gpu_start.py DIR OUT.json [--how first,warm,cold] [--serve ARGUMENTS]

`first` has an empty cache of compiled kernels, `warm` a filled one and the weights in the system's cache, `cold` the weights on
the drive alone; beside the latter stands how long the drive itself takes for the bytes, read directly by 8 threads. DIR is a
folder of gpu_serve.py's.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shlex
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_serve import Server

_PIECE = 32 << 20


def forget(files: list[Path]) -> None:
    """Out of the system's cache, without touching anything else that is in it."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def drive_bytes_per_s(files: list[Path]) -> float:
    def read(piece: tuple[Path, int]) -> int:
        fd = os.open(piece[0], os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(fd, [mmap.mmap(-1, _PIECE)], piece[1])
        finally:
            os.close(fd)

    pieces = [(file, offset) for file in files for offset in range(0, file.stat().st_size, _PIECE)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        num_bytes = sum(threads.map(read, pieces))
    return num_bytes / (time.perf_counter() - begun)


def start(folder: Path, context: int, arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        server = Server("stoker", folder, context, arguments, log)
        try:
            seconds = server.first_token_s()
        finally:
            server.stop()
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    stages = [(line["stage"], line["start_s"], line["seconds"]) for line in lines if line["event"] == "timeline"]
    memory = [(line["line"], line["planned_mib"], line["used_mib"]) for line in lines if line["event"] == "memory"]
    warnings = [line for line in lines if line["level"] != "info"]
    return {
        "first_token_s": seconds,
        "timeline": sorted(stages, key=lambda stage: stage[1]),
        "memory": memory,
        "warnings": warnings,
    }


def show(how: str, found: dict[str, Any]) -> None:
    print(f"{how}: first token after {found['first_token_s']:.2f} s", flush=True)
    for name, start_s, seconds in found["timeline"]:
        print(f"  {start_s:7.2f} + {seconds:6.2f} s  {name}", flush=True)
    for name, planned, used in found["memory"]:
        print(f"  {name:24} {planned:8} MiB planned {used:8} used", flush=True)
    for line in found["warnings"]:
        print(f"  {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--how", default="first,warm,cold")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "stoker-start-cache")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--serve", default="", help="further arguments of the server, as one text")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.safetensors"))
    results: dict[str, Any] = {"bytes": sum(file.stat().st_size for file in files)}
    for how in args.how.split(","):
        if how == "first":
            shutil.rmtree(args.cache, ignore_errors=True)
        if how == "cold":
            forget(files)
            results["drive_bytes_per_s"] = drive_bytes_per_s(files)
            results["drive_s"] = results["bytes"] / results["drive_bytes_per_s"]
            print(f"drive: {results['drive_bytes_per_s'] / 1e9:.2f} GB/s, {results['drive_s']:.2f} s", flush=True)
            forget(files)
        results[how] = start(args.folder, args.context, ["--cache-dir", str(args.cache), *shlex.split(args.serve)])
        show(how, results[how])
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
