"""Four experiments of the simulator: why sessions have headers, why prefill and decode are divided, what a shared store changes,
and what a million tokens cost.

The worker is a closed-form estimate of Kimi K2.5 on 8 H200 GPUs, as `stoker calibrate --gpu 8xH200` writes it. The load is that
of bench/support/agent_mix.py: agents that resend a growing conversation. docs/simulator.md lists all assumptions.
Everything runs on a virtual clock, so a busy machine gives the same numbers.
"""

from __future__ import annotations

import argparse

from bench.contract import Needs, Report

NAME = "sim_experiments"
HELP = "simulated agents on Kimi K2.5: session headers, disaggregation, a shared KV store, and cost by fleet size"
NEEDS = Needs(packages=("msgspec",))
EXPERIMENTS = ("headers", "disaggregation", "shared_store", "cost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), help="default: all")
    parser.add_argument(
        "--arrivals-s", type=float, default=40.0, help="sessions start during this virtual time (default: %(default)s)"
    )
    parser.add_argument(
        "--max-workers",
        type=int,
        default=64,
        help="leave out larger fleets; a worker has 8 GPUs (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu-hour-price", type=float, default=3.0, help="price of an H200-hour (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> Report:
    from bench.gateway import _sim_experiments

    report = Report(details=[])
    world = _sim_experiments.Experiments(args.arrivals_s, args.max_workers, args.gpu_hour_price, report)
    for name in args.experiments:
        getattr(world, name)()
    return report
