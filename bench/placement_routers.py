"""Where routers put agent sessions: hits and skew over mock workers with real prefix caches, several routers in one run.

    python bench/placement_routers.py --placement PLACEMENT.py --out placement \\
        --router 'stoker=stoker gateway --port {port} {workers:--worker,dialect=openai}' \\
        --router 'smg=smg launch --host 127.0.0.1 --port {port} --worker-urls {workers}'

PLACEMENT is the driver (`PLACEMENT workers`, `PLACEMENT drive`). Every cell has a cold router: it is started for the case, driven
once and stopped. `{workers}` are the four URLs; `{workers:OPTION,SUFFIX}` puts OPTION before each and `,SUFFIX` behind it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway_overhead import free_port, process, wait_ready

CASES = ("A1", "A2", "A3")


def fill(command: str, port: int, urls: Sequence[str]) -> list[str]:
    def workers(found: re.Match[str]) -> str:
        option, _, suffix = (found.group(1) or "").partition(",")
        return " ".join(f"{option} {url}{',' + suffix if suffix else ''}" for url in urls)

    command = re.sub(r"\{workers(?::([^}]*))?\}", workers, command)
    return shlex.split(command.replace("{port2}", str(free_port())).replace("{port}", str(port)))


def measure(
    command: str, header: str | None, case: str, seed: int, ports: Sequence[int], args: argparse.Namespace
) -> Any:
    port = free_port()
    urls = [f"http://127.0.0.1:{worker}" for worker in ports]
    with process(fill(command, port, urls), args.log_dir / "routers.log"):
        wait_ready(port, "mock", 60)
        time.sleep(1.0)
        drive = [sys.executable, str(args.placement), "drive", "--url", f"http://127.0.0.1:{port}", "--case", case]
        drive += ["--ports", ",".join(map(str, ports)), "--seed", str(seed)]
        if header:
            drive += ["--session-header", header]
        done = subprocess.run(drive, capture_output=True, text=True, timeout=600)
        if done.returncode:
            return {"error": done.stderr[-400:]}
        return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME=HEADER", help="also with this session header"
    )
    parser.add_argument("--placement", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--seed", type=int, action="append", help="default: 7")
    parser.add_argument("--log-dir", type=Path, default=Path("build/placement"))
    parser.add_argument("--out", type=Path, default=Path("build/placement/result"))
    args = parser.parse_args()
    args.log_dir.mkdir(parents=True, exist_ok=True)
    headers = dict(given.split("=", 1) for given in args.header)
    ports = [free_port() for _ in range(4)]
    rows: list[dict[str, Any]] = []
    workers = [sys.executable, str(args.placement), "workers", "--ports", ",".join(map(str, ports))]
    with process(workers, args.log_dir / "workers.log"):
        time.sleep(2.0)
        for name, command in (given.split("=", 1) for given in args.router):
            for header in [None, headers[name]] if name in headers else [None]:
                for case in args.case or CASES:
                    for seed in args.seed or [7]:
                        row = {"router": name, "header": header or "", "case": case, "seed": seed}
                        row |= measure(command, header, case, seed, ports, args)
                        rows.append(row)
                        print(json.dumps(row), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    table = markdown(rows, args.case or list(CASES))
    args.out.with_suffix(".md").write_text(table)
    print(table)
    return 0


def markdown(rows: Sequence[dict[str, Any]], cases: Sequence[str]) -> str:
    """hit / skew, medians over the seeds; the worst skew in brackets where there are several."""
    lines = ["| router | header | " + " | ".join(cases) + " |", "|---|---|" + "---|" * len(cases)]
    for name, header in dict.fromkeys((row["router"], row["header"]) for row in rows):
        cells = []
        for case in cases:
            mine = [row for row in rows if (row["router"], row["header"], row["case"]) == (name, header, case)]
            if any("error" in row for row in mine):
                cells.append("failed")
                continue
            hit, skews = statistics.median(row["hit"] for row in mine), [row["skew"] for row in mine]
            worst = f" ({max(skews):.2f})" if len(skews) > 1 else ""
            cells.append(f"{hit:.3f} / {statistics.median(skews):.2f}{worst}")
        lines.append(f"| {name} | {header or '-'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
