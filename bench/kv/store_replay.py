"""Hit ratio of a recorded trace with a real, shared KV store: round robin, little RAM, a restart.

Each block of the trace (512 tokens) becomes one of 4 tokens with 4 KiB of KV. The model is left out; everything else is
real: scheduler, pool, write-behind, host tier in shared memory, disk tier, loads with their checksums. Workers are
separate engines that share the store. Requests go to them in turn (round robin) or to the worker that had the
conversation before (sticky). In the last configuration all workers are killed with SIGKILL in the middle, the shared
memory is lost too, and new workers continue with what the disk has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.contract import Needs, Report

NAME = "store_replay"
HELP = "hit ratio of a recorded trace with a shared KV store, with little RAM, and after a restart"
TRACE = "traces/mooncake_conversation.jsonl.gz"
NEEDS = Needs(packages=("torch", "numpy", "xxhash"), data=(TRACE,))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="?", type=Path, help=f"Mooncake's format (default: {TRACE} of the data folder)")
    parser.add_argument("--requests", type=int, default=3000, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--device-blocks", type=int, default=400, help="of each worker's pool (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for the disk tier (default: a temporary folder)")


def run(args: argparse.Namespace) -> Report:
    from bench.kv._store_replay import measure_all

    return measure_all(args, args.trace or args.data / TRACE)
