"""GB/s of the KV store's tiers beside their raw media, for blocks of 0.5, 2 and 8 MiB.

In each round a tier is measured right after its raw medium, and their ratio is the median of the rounds' own ratios.
Host tier: one copy from memory to memory (one thread). Disk tier: direct reads of one plain file that was written
before, by the tier's number of threads and in pieces of its size; for writes the same the other way. Buffers are page-aligned,
as the engine's are.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench.contract import Needs, Report

NAME = "tier_bandwidth"
HELP = "GB/s of the host and disk tiers beside memcpy and raw reads and writes of the same disk"
NEEDS = Needs(packages=("torch", "numpy", "xxhash"))
MEDIA = ("disk", "host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=256, help="moved in each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=MEDIA, default=list(MEDIA), help="default: both")


def run(args: argparse.Namespace) -> Report:
    from bench.kv._tier_bandwidth import measure_all

    return measure_all(args.mib, args.rounds, args.only, args.dir)
