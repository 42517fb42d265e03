"""Times the candidate tiles of the matmul kernels on a GPU, to choose their defaults.

For dense shapes: the projections of a layer and the output head, with the kernels for few rows, beside cuBLAS. For
MoE shapes: each kernel of a layer of experts, in the weight type of the shape's variant (bf16, fp8, blocks, int4).
Each weight is copied often enough that the L2 cache holds none of them.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.contract import Needs, Report
from bench.support.model_shapes import QUANTIZED, SHAPES

if TYPE_CHECKING:
    from torch import Tensor

    from stoker.kernels.skinny import SkinnyTile

NAME = "tile_search"
HELP = "GPU time of the candidate tiles of the matmul and MoE kernels"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy", "safetensors"))
# Llama-3.1-8B: name, outputs, inputs.
MATMULS = [
    ("qkv", 6144, 4096),
    ("out", 4096, 4096),
    ("gate_up", 28672, 4096),
    ("down", 4096, 14336),
    ("head", 128256, 4096),
]
_COLD_BYTES = 400_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama8b", help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    if "num_experts" not in SHAPES[args.shape]:
        return Report(details=_dense())
    from bench.support import moe_tiles

    variant = args.shape.rpartition("-")[2]
    lines = moe_tiles.tiles(moe_tiles.MoeShape(), variant if variant in QUANTIZED else "bf16")
    for line in lines:
        print(" ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in line.values()))
    return Report(details=lines)


def _dense() -> list[dict[str, Any]]:
    from stoker.kernels.skinny import SkinnyTile

    one = [SkinnyTile(outs, ins, 4, stages) for outs, ins in ((8, 256), (8, 512), (16, 256)) for stages in (1, 3, 4)]
    one += [SkinnyTile(4, 512, 4, 4), SkinnyTile(8, 512, 8, 1), SkinnyTile(8, 512, 8, 3)]
    few = [SkinnyTile(64, ins, 4, stages) for ins, stages in ((128, 4), (128, 6), (256, 4), (256, 5))]
    few += [SkinnyTile(32, 512, 4, 4), SkinnyTile(64, 128, 4, 4, splits=2), SkinnyTile(64, 256, 4, 4, splits=4)]
    more = [
        SkinnyTile(64, 128, 4, 6),
        SkinnyTile(128, 128, 8, 4),
        *(SkinnyTile(64, 128, 4, 4, splits) for splits in (1, 2, 4)),
    ]
    return _times(1, one) + _times(8, few) + _times(64, more)


def _times(num_rows: int, candidates: list[SkinnyTile]) -> list[dict[str, Any]]:
    import torch
    from torch.nn.functional import linear

    from bench.support.cuda_timing import graph_s
    from stoker.kernels.skinny import few_rows_linear, one_row_linear

    kernel = one_row_linear if num_rows == 1 else few_rows_linear
    lines = []
    for name, outs, ins in MATMULS:
        num_copies = max(2, _COLD_BYTES // (outs * ins * 2))
        weights = [torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(num_copies)]
        x = torch.randn(num_rows, ins, device="cuda", dtype=torch.bfloat16)

        def timed(
            tile: SkinnyTile | None, x: Tensor = x, weights: list[Tensor] = weights, name: str = name
        ) -> dict[str, Any]:
            calls = [
                partial(linear, x, weight) if tile is None else partial(kernel, x, weight, tile=tile)
                for weight in weights
            ]
            seconds = graph_s(calls)
            rates = {"us": seconds * 1e6, "GB/s": weights[0].numel() * 2 / seconds / 1e9}
            return {"matmul": name, "rows": num_rows, "tile": "cuBLAS" if tile is None else str(tile), **rates}

        found = sorted((timed(tile) for tile in [None, *candidates]), key=lambda line: line["us"])
        for line in found[:4] + [line for line in found[4:] if line["tile"] == "cuBLAS"]:
            print(f"{name:8} {num_rows:3} {line['tile']:60} {line['us']:8.1f} us {line['GB/s']:6.0f} GB/s", flush=True)
        lines += found
    return lines
