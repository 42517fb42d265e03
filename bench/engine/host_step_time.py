"""Host time of a decode-only step, by part, without a GPU.

The real loop, scheduler, packing and pipe run around a device whose tokens are there at once. Every row decodes from 600
tokens of context on, in blocks of 64 tokens, one step ahead of the device. The results are medians over 256 steps; the
calls into a real GPU driver are not in them.
"""

from __future__ import annotations

import argparse

from bench.contract import Needs, Report

NAME = "host_step_time"
HELP = "host time of a decode step of 256 rows by part, with a device that answers at once; needs no GPU"
NEEDS = Needs(packages=("torch", "numpy", "msgspec"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="print where the time goes by function")


def run(args: argparse.Namespace) -> Report:
    from bench.engine._host_step_time import measure

    return measure(args.rows, args.profile)
