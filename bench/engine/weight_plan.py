"""Time until every tensor of a very large checkpoint has its place in the model: headers, names, shapes, no weights.

The checkpoint has the tensor names and shapes of a 1T-parameter model with int4 experts (bench/support/large_checkpoint.py),
with real headers and empty files. CPU time of one process; the headers are in the page cache from the second round on.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path

import torch

from bench.contract import Needs, Report, Result
from bench.support.large_checkpoint import CONFIG, make_large
from stoker.base import garbage
from stoker.models.family import family_of
from stoker.models.weights import plan_copies

NAME = "weight_plan"
HELP = "CPU time to plan the loading of a checkpoint with 200,000 tensors"
NEEDS = Needs()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        num_tensors = make_large(Path(folder))
        for _ in range(args.rounds):
            gc.collect()
            started_s = time.process_time()
            with garbage.paused():  # as in a start
                plan_large(Path(folder))
            times.append(time.process_time() - started_s)
    raw = [{"num_tensors": num_tensors, "cpu_s": one} for one in times]
    return Report([Result(f"{num_tensors:,} tensors", "CPU time, best round", "s", min(times), "lower")], raw)


def plan_large(folder: Path) -> int:
    """Plan the loading of the large checkpoint, and return the number of copies."""
    family = family_of(CONFIG, "config.json")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = family.build(128)
    finally:
        torch.set_default_dtype(default)
    return len(plan_copies(model, family.rules, family.ignored, folder))
