"""Steps that hold prompt tokens, on a GPU: replayed from a CUDA graph against launched kernel by kernel.

A mixed step is 32 rows that decode at 1,000 tokens of context, and one prompt chunk behind 4,096 tokens. `ms` is the
time of one step of a sequence of steps launched one ahead, `host us` is what launching one costs the host. The logits of
both ways are compared; `noise` is what another batch alone makes of them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from pathlib import Path

from bench.contract import Needs, Report, Result
from bench.support.model_shapes import SHAPES, title

NAME = "mixed_steps"
HELP = "GPU and host time of steps with prompt tokens: CUDA graph against kernel by kernel"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy", "safetensors"))
# Decoding rows, tokens of the chunk, tokens before it.
MIXED = [
    (32, 16, 4096), (32, 64, 4096), (32, 128, 4096), (32, 256, 4096), (32, 448, 4096), (32, 900, 4096),
    (0, 16, 0), (0, 128, 0), (0, 512, 0), (0, 64, 30000), (8, 300, 30000),
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random weights of --shape")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama8b", help="default: %(default)s")
    parser.add_argument("--decode", action="store_true", help="also decode-only steps, greedy and with top_p")
    parser.add_argument("--prefill", action="store_true", help="also prefill-only steps")
    parser.add_argument("--profile", action="store_true", help="print what the host does in a launch")


def run(args: argparse.Namespace) -> Report:
    from bench.support.engine_steps import GREEDY, EngineSteps, Spans, build_llm
    from stoker.sched.request import SamplingParams

    steps = EngineSteps(build_llm(args.model, args.shape, 32768))
    model = args.model.name if args.model else title(args.shape)
    report = Report(details={})

    def tell(name: str, found: dict[str, float]) -> None:
        report.details[name] = found
        print(f"{name:28}" + " ".join(f"{key}={value:.4g}" for key, value in found.items()), flush=True)

    def captured_and_eager(name: str, spans: Spans, num_rows: int) -> None:
        eager = steps.eagerly(lambda: steps.ahead_ms(spans, repeats=6))
        captured = steps.ahead_ms(spans)
        logits, expected = steps.logits(spans), steps.eagerly(lambda: steps.logits(spans))
        largest = expected.abs().max()
        other = steps.eagerly(lambda: steps.logits([*spans[:-1], (0, 64)]))[:-1]
        noise = float((other - expected[:-1]).abs().max() / largest) if num_rows else 0.0
        found = {**captured, **{f"eager_{key}": value for key, value in eager.items()}}
        tell(name, {**found, "logits_error": float((logits - expected).abs().max() / largest), "noise": noise})
        report.results.append(
            Result(
                f"{model}, {name}",
                "step, CUDA graph",
                "ms",
                captured["ms"],
                "lower",
                "kernel by kernel",
                eager["ms"],
                "baseline",
            )
        )

    for num_rows, chunk, before in MIXED:
        name = f"{num_rows} rows and {chunk} prompt tokens behind {before:,}"
        captured_and_eager(name, [(1000, 1)] * num_rows + [(before, chunk)], num_rows)
    if args.decode:
        top_p = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
        for num_rows in (1, 8, 64, 256):
            spans = [(257, 1)] * num_rows
            greedy, sampled = steps.ahead_ms(spans, repeats=40), steps.ahead_ms(spans, top_p)
            tell(f"decode {num_rows}", greedy)
            tell(f"decode {num_rows}, top_p", sampled)
            case = f"{model}, decode, batch {num_rows}"
            report.results.append(
                Result(case, "step, top_p 0.95", "ms", sampled["ms"], "lower", "greedy", greedy["ms"], "baseline")
            )
        tell("63 at 1,000, one at 30,000", steps.ahead_ms([(30000 if row == 0 else 1000, 1) for row in range(64)]))
    if args.prefill:
        for name, spans in [("8k", [(0, 8192)]), ("2 x 4k", [(0, 4096)] * 2), ("2k", [(0, 2048)]), ("1k", [(0, 1024)])]:
            tell(f"prefill {name}", steps.ahead_ms(spans, repeats=5))
    if args.profile:
        for name, spans in [("decode 256", [(257, 1)] * 256), ("2k", [(0, 2048)])]:
            profile = cProfile.Profile()
            profile.enable()
            steps.ahead_ms(spans, GREEDY, 10)
            profile.disable()
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)
    return report
