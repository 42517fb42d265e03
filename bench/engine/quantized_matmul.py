"""Matmuls with weights in 8 and 4 bits on a GPU, by rows, beside bf16.

The projections of Llama-3.1-8B, each weight copied often enough that the L2 cache holds none of them. The share is of 4.3 TB/s,
which a memory copy reaches on an H200. `bench run offline --shape llama8b-fp8` runs a whole quantized model.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from bench.contract import Needs, Report, Result
from bench.support.model_shapes import QUANTIZED

NAME = "quantized_matmul"
HELP = "GPU time of matmuls with 8-bit and 4-bit weights beside bf16"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy", "safetensors"))
MATMULS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
_COPY_BYTES_PER_S = 4.3e12
_COLD_BYTES = 240_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 2048])


def run(args: argparse.Namespace) -> Report:
    import torch

    from stoker.kernels.gpu_timing import graph_s
    from stoker.kernels.linear import linear
    from stoker.kernels.random_weights import bytes_of, make_weight
    from stoker.kernels.skinny import MAX_ROWS, few_rows_linear

    lines: list[dict[str, Any]] = []
    for matmul, shape in MATMULS.items():
        for kind in ("bf16", *QUANTIZED):
            weights = [make_weight(kind, *shape)]
            num_bytes = bytes_of(weights[0])
            weights += [make_weight(kind, *shape) for _ in range(_COLD_BYTES // num_bytes)]
            for num_rows in args.rows:
                x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
                is_plain = kind == "bf16" and num_rows <= MAX_ROWS
                kernel: Any = few_rows_linear if is_plain else linear
                seconds = graph_s([partial(kernel, x, weight) for weight in weights])
                share = num_bytes / seconds / _COPY_BYTES_PER_S
                lines.append({"matmul": matmul, "kind": kind, "rows": num_rows, "us": seconds * 1e6, "share": share})
            del weights
    bf16_us = {(line["matmul"], line["rows"]): line["us"] for line in lines if line["kind"] == "bf16"}
    results = [
        Result(
            f"{line['matmul']}, {line['rows']} rows, {line['kind']}", "matmul", "us", line["us"], "lower",
            "bf16", bf16_us[line["matmul"], line["rows"]], "baseline", f"{line['share']:.0%} of 4.3 TB/s",
        )
        for line in lines
        if line["kind"] != "bf16"
    ]  # fmt: skip
    return Report(results, lines)
