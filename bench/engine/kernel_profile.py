"""GPU time of a decode step by kernel, and of sampling a token by what the rows ask for.

A decode step has rows at 256 tokens of context. Sampling is timed alone, over Llama-3.1-8B's vocabulary.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from bench.contract import Needs, Report, Result
from bench.support.model_shapes import SHAPES, title

NAME = "kernel_profile"
HELP = "GPU time of a decode step by kernel, and of sampling"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy", "safetensors"))
BATCHES = (1, 8, 64, 256)
_CONTEXT = 256
_SAMPLING = {  # name -> top_k, temperature, top_p
    "greedy": (0, 0.0, 1.0),
    "temperature 1": (0, 1.0, 1.0),
    "top_p 0.95": (0, 1.0, 0.95),
    "top_k 40": (40, 1.0, 0.95),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random weights of --shape")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama8b", help="default: %(default)s")
    parser.add_argument("--top", type=int, default=14, help="kernels to print (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    from bench.support.engine_steps import EngineSteps, build_llm

    steps = EngineSteps(build_llm(args.model, args.shape, 16384))
    model = args.model.name if args.model else title(args.shape)
    report = Report(details={})
    for rows in BATCHES:
        spans = [(_CONTEXT, 1)] * rows
        kernels = report.details[f"batch {rows}"] = steps.kernels(spans)
        step_ms = steps.queued_s(spans) * 1e3
        report.results.append(Result(f"{model}, batch {rows}", "decode step at 256 tokens", "ms", step_ms))
        print(f"batch {rows}: {step_ms:.3f} ms a step", flush=True)
        for line in kernels[: args.top]:
            print(f"  {line['us']:9.1f} us {line['calls']:6.0f} x {line['kernel']}", flush=True)
    report.results += _sampling()
    return report


def _sampling() -> list[Result]:
    import torch

    from stoker.kernels.gpu_timing import graph_s
    from stoker.kernels.sample_rows import pack_settings, sample_rows_triton

    device, results = torch.device("cuda"), []
    for num_rows in BATCHES:
        logits = torch.randn(num_rows, 128256, device=device, dtype=torch.bfloat16) * 3
        rows, lengths = torch.arange(num_rows, device=device), torch.full((num_rows,), 300, device=device)
        for name, (top_k, temperature, top_p) in _SAMPLING.items():
            settings = torch.tensor([pack_settings(5, top_k, temperature, top_p, 0.0)] * num_rows, device=device)
            call = partial(sample_rows_triton, logits, rows, lengths, settings)
            case = f"128,256 tokens of vocabulary, {num_rows} rows"
            results.append(Result(case, f"sampling, {name}", "us", graph_s([call] * 3) * 1e6))
    return results
