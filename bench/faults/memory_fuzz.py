r"""Random requests on a GPU whose memory and KV pool are kept full: lengths, sampling, stops, logprobs, cancellation.

    python -m bench run memory_fuzz
    compute-sanitizer --tool memcheck --target-processes application-only --kernel-name kns=_attend … \
        python -m bench run memory_fuzz --requests 120 --rows 64 --left-gib 140 --kv-gib 0.25

A small model of SmolLM2's shape with random weights. All but --left-gib of the GPU's memory is allocated first, so that the
memory plan must hold: 2.6 GiB leave about 150,000 tokens of KV, which 512 rows would fill twice. Every request must end as
it should, no block may be lost, and no allocation may fail. Some greedy answers are then computed by transformers in
float32: each token must be the most likely one, or within a near tie of it.
"""

from __future__ import annotations

import argparse

from bench.contract import Needs, Report

NAME = "memory_fuzz"
HELP = "random requests with GPU memory and KV full: every request ends rightly, no block is lost, answers are right"
NEEDS = Needs(
    packages=("torch", "numpy", "safetensors", "transformers"), programs="a GPU; without one the check is weaker"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop adding requests after this (default: 3600)")
    parser.add_argument("--left-gib", type=float, default=2.6, help="GPU memory left to the engine (default: 2.6)")
    parser.add_argument("--kv-gib", type=float, help="default: what is left")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--checked", type=int, default=400, help="answers compared with transformers (default: 400)")
    parser.add_argument("--rows", type=int, default=512, help="running sequences (default: %(default)s)")
    parser.add_argument("--step-tokens", type=int, help="default: the engine's")


def run(args: argparse.Namespace) -> Report:
    from bench.faults._memory_fuzz import measure

    return measure(args)
