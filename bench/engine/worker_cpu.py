"""CPU time of a worker's server process for each streamed token, without a model and without a GPU.

The server is a process of its own: the real app over the real pipe. At the other end of the pipe a process plays the
engine: at each step it sends one token for every open sequence, all in one message. A third process is the client, with
--streams connections; each sends its next request when the last one has ended, 512 tokens in and 256 out. Only
MODEL_DIR's tokenizer is used.

The results are the server's own CPU seconds (user and system, all threads) per token, and the delay between the end of
a step and the arrival of its event: steps end at whole multiples of their length on the machine's monotonic clock, so
the client can tell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.contract import Needs, Report, Result

NAME = "worker_cpu"
HELP = "CPU time of the worker's server process per streamed token, with a simulated engine; needs no GPU"
NEEDS = Needs(packages=("aiohttp", "msgspec", "uvloop", "tokenizers"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a folder with tokenizer.json")
    parser.add_argument("--streams", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each stream (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="length of an engine step (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")


def run(args: argparse.Namespace) -> Report:
    from bench.engine._worker_cpu import measure

    found = measure(args)
    case = f"{args.streams} streams, {'/v1/chat/completions' if args.chat else '/v1/completions'}"
    results = [
        Result(case, "server CPU per token", "us", found["us_per_token"]),
        Result(case, "delay of a token p50", "ms", found["delay_p50_ms"]),
        Result(case, "delay of a token p99", "ms", found["delay_p99_ms"]),
    ]
    return Report(results, found)
