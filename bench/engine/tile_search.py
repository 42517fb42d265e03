"""Times the candidate tiles of the kernels for experts on a GPU, to choose their defaults.

Each kernel of a layer of experts runs in the weight type of the shape's variant (bf16, fp8, blocks, int4). The weights
of several layers are used in turn, so that the L2 cache holds none of them. `kernel_grid` does the same for dense
matmuls.
"""

from __future__ import annotations

import argparse

from bench.contract import Needs, Report
from bench.support.model_shapes import QUANTIZED, SHAPES

NAME = "tile_search"
HELP = "GPU time of the candidate tiles of the kernels for experts"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy", "safetensors"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        choices=[name for name, config in SHAPES.items() if "num_experts" in config],
        default="qwen30a3b",
        help="default: %(default)s",
    )


def run(args: argparse.Namespace) -> Report:
    from bench.support import moe_tiles

    variant = args.shape.rpartition("-")[2]
    lines = moe_tiles.tiles(moe_tiles.MoeShape(), variant if variant in QUANTIZED else "bf16")
    for line in lines:
        print(" ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in line.values()))
    return Report(details=lines)
