"""The command `scripts/fuzz`: runs targets, prints what they did, and saves the input of a bug.

scripts/fuzz                            all targets, 10 s each
scripts/fuzz --seconds 60 gguf_file     one target
scripts/fuzz --full                     ten minutes per network-facing target, three per file format
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
import time
import traceback

from tests.fuzz.campaign import Campaign, save
from tests.fuzz.target import load_target, target_names

_FULL_NETWORK_S, _FULL_FILE_S = 600.0, 180.0
_START_S = 120.0  # for imports, on a busy machine


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of: {', '.join(target_names())}")
    parser.add_argument("--seconds", type=float, default=10.0, help="Time for each target.")
    parser.add_argument("--seed", type=int, default=None, help="Seed of the mutations. Default: a random one.")
    parser.add_argument("--full", action="store_true", help="Run the full campaign instead of --seconds.")
    parser.add_argument("--jobs", type=int, default=1, help="Targets that run at the same time, each in its process.")
    args = parser.parse_args()
    names = args.targets or target_names()
    if unknown := sorted(set(names) - set(target_names())):
        parser.error(f"no such target: {', '.join(unknown)}; choose from {', '.join(target_names())}")
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    if len(names) == 1:
        return _run(names[0], seed, args.full, args.seconds)
    return _run_all(names, seed, args)


def _run(name: str, seed: int, full: bool, seconds: float) -> int:
    logging.disable(logging.CRITICAL)  # the targets log each refused input
    target = load_target(name)
    if full:
        seconds = _FULL_NETWORK_S if target.is_network else _FULL_FILE_S
    result = Campaign(target, seed).run(seconds)
    rate = result.executions / max(result.seconds, 1e-9)
    print(f"{name}: seed {seed}, {result.executions} executions, {rate:.0f}/s, {result.pool} inputs kept", flush=True)
    if result.failure is None:
        return 0
    traceback.print_exception(result.failure.error)
    path = save(name, result.failure)
    print(f"{name}: FAILED, {result.failure.kind}; input of {len(result.failure.data)} bytes: {path}", flush=True)
    return 1


def _run_all(names: list[str], seed: int, args: argparse.Namespace) -> int:
    """Run each target in a process of its own, so that they do not share memory, signal handlers or threads."""
    command = [sys.executable, "-m", "tests.fuzz", "--seed", str(seed), "--seconds", str(args.seconds)]
    command += ["--full"] * args.full
    waiting, running, failed = list(names), {}, []
    limit_s = (_FULL_NETWORK_S if args.full else args.seconds) + _START_S
    while waiting or running:
        while waiting and len(running) < max(1, args.jobs):
            name = waiting.pop(0)
            running[name] = (subprocess.Popen([*command, name]), time.monotonic() + limit_s)
        time.sleep(0.05)
        for name, (process, until_s) in list(running.items()):
            if process.poll() is None and time.monotonic() > until_s:
                process.kill()  # for example, a loop in C, which the alarm cannot interrupt
                print(f"{name}: FAILED, it did not end; seed {seed}", flush=True)
                process.wait()
            if process.poll() is not None:
                failed += [name] if process.returncode else []
                del running[name]
    print(
        f"{len(names) - len(failed)} of {len(names)} targets passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
