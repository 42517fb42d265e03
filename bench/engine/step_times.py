"""How long a step takes on a GPU by rows, tokens and context: the numbers that a model of the engine needs.

A decode step has one token for each of `rows`, all at `context` tokens. A chunk is one span of `tokens` behind `context`
tokens; small chunks wait for the host, which launches their kernels one by one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.contract import Needs, Report, Result
from bench.support.model_shapes import SHAPES, title

NAME = "step_times"
HELP = "GPU time of decode steps and prompt chunks by rows, tokens and context"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy", "safetensors"))
ROWS, DECODE_CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (128, 1024, 4096, 15000)
CHUNKS, CHUNK_CONTEXTS = (16, 64, 256, 512, 1024, 2048, 4096, 8192), (0, 4096, 8000)
_MAX_TOKENS = 16384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random weights of --shape")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama8b", help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    from bench.support.engine_steps import EngineSteps, build_llm

    steps = EngineSteps(build_llm(args.model, args.shape, _MAX_TOKENS))
    model = args.model.name if args.model else title(args.shape)
    results = []
    for rows in ROWS:
        for context in DECODE_CONTEXTS:
            spans = [(context, 1)] * rows
            if steps.fits(spans):
                case = f"{model}, {rows} rows at {context:,} tokens"
                results.append(Result(case, "decode step", "ms", steps.queued_s(spans, 10) * 1e3))
    for tokens in CHUNKS:
        for context in CHUNK_CONTEXTS:
            if context + tokens < _MAX_TOKENS:
                case = f"{model}, {tokens:,} tokens behind {context:,}"
                results.append(Result(case, "prompt chunk", "ms", steps.alone_s([(context, tokens)]) * 1e3))
    return Report(results)
