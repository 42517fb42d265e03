"""What numerics=exact costs on a GPU: per kernel, and for whole steps of a model with random weights.

    python -m bench run exact_numerics --save
    python -m bench run exact_numerics --shape qwen30a3b

The baseline is numerics=fast, in the same run. Verification is compared with the same tokens as prefill, which is what
numerics=fast without a drafter would run.
"""

from __future__ import annotations

import argparse

from bench.contract import Needs, Report, Result
from bench.support.model_shapes import SHAPES, title

NAME = "exact_numerics"
HELP = "cost of numerics=exact beside fast, by batch size: matmuls, attention and whole steps"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy", "safetensors"))
ROWS = (1, 2, 8, 64, 256)
CONTEXTS = (1024, 8192)
DRAFTS = (3, 7)
MATMULS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}  # of Llama-3.1-8B
_HEADS = (32, 8, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama8b", help="of the steps; default: %(default)s")
    parser.add_argument("--kinds", nargs="+", default=["bf16", "fp8", "blocks", "int4"], help="of the weights")
    parser.add_argument("--only", choices=("matmuls", "attention", "steps"), help="default: all three")


def run(args: argparse.Namespace) -> Report:
    results: list[Result] = []
    if args.only in (None, "matmuls"):
        results += _matmuls(args.kinds)
    if args.only in (None, "attention"):
        results += _attention()
    if args.only in (None, "steps"):
        results += _steps(args.shape)
    return Report(results)


def _result(case: str, metric: str, unit: str, exact: float, fast: float) -> Result:
    return Result(case, metric, unit, exact, "lower", "fast", fast, "baseline")


def _matmuls(kinds: list[str]) -> list[Result]:
    from bench.engine._exact_numerics import matmul_us

    return [
        _result(f"{name}, {kind}, {rows} rows", "matmul", "us", exact, fast)
        for kind in kinds
        for name, shape in MATMULS.items()
        for rows, exact, fast in matmul_us(kind, *shape, (*ROWS, 32, 1024, 8192))
    ]


def _attention() -> list[Result]:
    from bench.engine._exact_numerics import attention_us

    results = []
    for rows in ROWS:
        for context in CONTEXTS:
            case = f"{rows} rows at {context:,} tokens"
            results.append(_result(case, "attention", "us", *attention_us(_HEADS, [(context, 1)] * rows)))
            for drafts in DRAFTS:
                times = attention_us(_HEADS, [(context, 1 + drafts)] * rows, verifies=True)
                results.append(_result(f"{case}, {drafts} drafts", "attention", "us", *times))
    for tokens, before in ((512, 0), (2048, 8192)):
        case = f"{tokens:,} tokens behind {before:,}"
        results.append(_result(case, "attention", "us", *attention_us(_HEADS, [(before, tokens)])))
    return results


def _steps(shape: str) -> list[Result]:
    from bench.engine._exact_numerics import step_ms

    cases = {
        f"{title(shape)}, {rows} rows at {context:,} tokens": [(context, 1)] * rows
        for rows in ROWS
        for context in CONTEXTS
    }
    cases |= {f"{title(shape)}, {tokens:,} tokens of a prompt": [(0, tokens)] for tokens in (512, 2048, 8192)}
    fast, exact = (step_ms(shape, numerics, list(cases.values())) for numerics in ("fast", "exact"))
    return [
        _result(case, "step", "ms", ours, theirs)
        for case, ours, theirs in zip(cases, exact, fast, strict=True)
        if ours is not None and theirs is not None
    ]
