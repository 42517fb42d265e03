"""The Mooncake tier beside Mooncake's bare API: GB/s of whole blocks, with all that a tier adds (header, checksum).

A master and a worker that owns a segment are processes of their own. This process has a bare client and a tier, both
without a segment, so that every byte crosses a socket. Both move the same blocks with the same number of calls, from and
into the same memory, which was touched before on both sides. The two sides alternate within each round; the results are
medians of the rates and of the rounds' own ratios.
"""

from __future__ import annotations

import argparse

from bench.contract import Needs, Report

NAME = "mooncake_tier"
HELP = "GB/s of the Mooncake tier beside Mooncake's bare API"
NEEDS = Needs(packages=("torch", "numpy", "xxhash", "mooncake"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=41, help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    from bench.kv._mooncake_tier import measure_all

    return measure_all(args.rounds)
