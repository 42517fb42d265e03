"""How fast blocks move from one worker's KV pool to another's, by each transport, beside the raw medium.

Two processes on one machine. Every number is the median over the rounds. In each round a transport and its raw medium take
turns, and their ratio is the median of the rounds' own ratios: memcpy between two shared mappings (one thread), a plain
socket that fills the same blocks, Mooncake's bare API. The details also hold the same pulls without a checksum, on both
sides. `tier_bandwidth` measures the tiers of the KV store.
"""

from __future__ import annotations

import argparse

from bench.contract import Needs, Report

NAME = "transport_bandwidth"
HELP = "GB/s of KV blocks between two workers by transport, beside memcpy, a socket and Mooncake's bare API"
NEEDS = Needs(packages=("torch", "numpy", "xxhash"), programs="the mooncake package for that transport")
# What each transport is compared with, and the share of it that it must reach.
TARGETS = {"local": ("memcpy", 0.8), "tcp": ("socket", 0.8), "mooncake": ("mooncake bare", 0.9)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--transports", nargs="+", choices=tuple(TARGETS), default=list(TARGETS), help="default: all")


def run(args: argparse.Namespace) -> Report:
    from bench.kv._transport_bandwidth import measure_all
    from stoker.kv.peer.transports.transport import TRANSPORTS

    return measure_all(tuple(name for name in args.transports if name in TRANSPORTS), args.rounds)
