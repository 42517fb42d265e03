"""The chosen tiles of the dense matmuls against all candidates and the library, over weights of published models.

    python -m bench run kernel_grid --save                     # the matmuls that the profiles were not fitted to
    python -m bench run kernel_grid --grid fitted --details grid.json --wide    # data for new profiles

For every weight shape, kind of weight and number of rows: the time of the chosen tile, of the fastest candidate and of
the library. The regret is the first divided by the smallest of all; the worst is reported first. Candidates are the
tiles of the profiles (kernels/tile_profiles.py), or with --wide all tiles that were ever worth trying. Other processes
compile them first, which takes most of the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from math import exp, log
from statistics import mean
from typing import TYPE_CHECKING, Any

from bench.contract import Needs, Report, Result

if TYPE_CHECKING:
    from stoker.kernels.tile_model import SkinnyTile
    from stoker.kernels.tile_timing import TileJob

NAME = "kernel_grid"
HELP = "regret of the chosen matmul tiles over a grid of weight shapes, beside all candidates and cuBLAS"
NEEDS = Needs(gpu=True, packages=("torch", "triton", "numpy", "safetensors"))
# Outputs and inputs of qkv, out, gate_up and down (and some heads).
GRIDS: dict[str, list[tuple[int, int]]] = {
    "fitted": [
        (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048),  # Llama-3.2-1B
        (6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728),  # Qwen3-4B
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),  # Llama-3.1-8B
        (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408),  # Qwen3-14B
        (10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600), (151936, 5120),  # Qwen3-32B
        (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),  # Llama-3.1-70B
    ],
    "held-out": [
        (5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192),  # Llama-3.2-3B
        (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944),  # Qwen2.5-7B
        (6144, 5120), (5120, 4096), (28672, 5120), (5120, 14336),  # Mistral-Nemo-12B
        (7680, 5120), (35840, 5120), (5120, 17920),  # Phi-4
        (8192, 6144), (6144, 6144), (32768, 6144), (6144, 16384),  # Mixtral-8x22B's dense parts, InternLM2-20B
        (14336, 12288), (12288, 12288), (57344, 12288), (12288, 28672),  # Mistral-Large-123B
        (1152, 896), (9728, 896), (896, 4864),  # Qwen2.5-0.5B
    ],
}  # fmt: skip
# Outputs, inputs, warps and stages, by kind and rows.
WIDE: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "bf16": {
        1: [(8, 512, 4, 3), (8, 256, 4, 4), (16, 256, 4, 3), (4, 512, 4, 4), (8, 1024, 4, 2), (4, 1024, 4, 3),
            (8, 512, 8, 3), (2, 1024, 4, 4), (4, 2048, 8, 2), (16, 512, 8, 2)],
        16: [(16, 512, 4, 3), (16, 256, 4, 5), (32, 256, 4, 4), (32, 512, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6),
             (64, 256, 4, 4), (128, 128, 8, 4), (32, 128, 4, 6), (128, 64, 4, 6)],
        32: [(32, 128, 4, 5), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 5), (128, 128, 8, 4),
             (128, 128, 4, 3), (16, 256, 4, 4)],
        64: [(32, 128, 4, 5), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 5), (128, 128, 8, 4),
             (128, 128, 4, 3), (64, 256, 8, 3), (256, 64, 8, 4)],
        128: [(64, 64, 4, 5), (64, 128, 4, 4), (128, 64, 4, 5), (128, 128, 8, 3), (128, 64, 8, 5), (64, 128, 8, 4)],
    },
    "fp8": {
        128: [(32, 256, 2, 4), (32, 256, 2, 3), (64, 128, 4, 4), (128, 128, 4, 4), (32, 512, 4, 3), (64, 256, 4, 3),
              (32, 128, 2, 6), (64, 128, 8, 3)],
    },
    "blocks": {
        128: [(32, 128, 2, 4), (32, 128, 2, 3), (64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 4, 4), (32, 128, 4, 5),
              (64, 128, 8, 3)],
    },
    "int4": {
        128: [(128, 256, 4, 3), (128, 256, 4, 4), (64, 256, 4, 2), (64, 256, 4, 3), (128, 256, 4, 2), (32, 256, 4, 4),
              (32, 256, 2, 3), (64, 256, 8, 3)],
    },
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", choices=tuple(GRIDS), default="held-out", help="weight shapes (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(WIDE), default=list(WIDE), help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="default: 1 8 32 64")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="measure only every N-th shape of the grid")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N shapes of the grid")
    parser.add_argument("--wide", action="store_true", help="try all tiles instead of those with a profile")
    parser.add_argument("--processes", type=int, default=12, help="processes that compile (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    import torch

    from stoker.kernels.tile_timing import compile_tiles, time_tiles

    jobs = list(_jobs(args))
    for done in compile_tiles(jobs, args.processes):
        if sys.stderr.isatty():
            print(f"compiled {done} of {len(jobs)}", end="\r", file=sys.stderr)
    lines, details = [], []
    for job in jobs:
        found = {tile: us for us, tile in time_tiles(job)}
        torch.cuda.empty_cache()
        details += [_detail(job, tile, us) for tile, us in found.items()]
        lines.append(_line(job, found))
    lines.sort(key=lambda line: -line["regret"])
    for line in lines:
        print(" ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in line.values()))
    return Report(_results(lines), details)


def _jobs(args: argparse.Namespace) -> Iterator[TileJob]:
    from stoker.kernels.tile_timing import TileJob

    for kind in args.kinds:
        for outs, ins in GRIDS[args.grid][args.skip :: args.every]:
            if kind != "bf16" and (outs > 100_000 or ins % 128):
                continue  # heads are not quantized, and the kernels' groups and blocks must fit
            for rows in args.rows:
                yield TileJob(kind, rows, outs, ins, tuple(dict.fromkeys(_tiles(kind, rows, outs, ins, args.wide))))


def _tiles(kind: str, rows: int, outs: int, ins: int, wide: bool) -> Iterator[SkinnyTile | None]:
    """The library, and the candidates; the chosen tile is always among them."""
    from stoker.kernels.tile_choice import max_rows, row_class
    from stoker.kernels.tile_model import SPLITS, RowClass, SkinnyTile, TileProfile
    from stoker.kernels.tile_profiles import WEIGHT_BYTES

    yield None
    if rows <= max_rows(kind):
        yield from (tile for _, tile in row_class(kind, rows).candidates(outs, ins, WEIGHT_BYTES[kind]))
    if wide:
        rows_class = next(most for most in WIDE[kind] if rows <= most)
        fetched = int(kind == "bf16" and rows > 1)
        tiles = [SkinnyTile(*numbers, fetched=fetched) for numbers in WIDE[kind][rows_class]]
        unknown = tuple(TileProfile(tile, 1, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0) for tile in tiles)
        every = RowClass(rows, unknown, splits=SPLITS if kind != "bf16" or rows > 1 else (1,))
        yield from (tile for _, tile in every.candidates(outs, ins, 1.0))


def _line(job: TileJob, found: dict[SkinnyTile | None, float]) -> dict[str, Any]:
    from stoker.kernels.tile_choice import is_library_faster, max_rows, skinny_tile

    shape = (job.kind, job.rows, job.outs, job.ins)
    uses_library = job.rows > max_rows(job.kind) or is_library_faster(*shape)
    chosen = None if uses_library else skinny_tile(*shape)
    # The library quantises the inputs of 8-bit weights too, which is another result: it is no candidate for those.
    best = min(
        (tile for tile in found if tile is not None or job.kind == "bf16" or chosen is None), key=found.__getitem__
    )
    line = {"kind": job.kind, "rows": job.rows, "outs": job.outs, "ins": job.ins}
    times = {"us": found[chosen], "best_us": found[best], "library_us": found[None]}
    return line | times | {"regret": found[chosen] / found[best], "tile": _text(chosen), "best": _text(best)}


def _text(tile: SkinnyTile | None) -> str:
    return "library" if tile is None else f"{tile.outs}x{tile.ins},{tile.num_warps}w,{tile.num_stages}s,/{tile.splits}"


def _detail(job: TileJob, tile: SkinnyTile | None, us: float) -> dict[str, Any]:
    numbers = None if tile is None else [tile.outs, tile.ins, tile.num_warps, tile.num_stages, tile.splits]
    return {"kind": job.kind, "rows": job.rows, "outs": job.outs, "ins": job.ins, "tile": numbers, "us": round(us, 2)}


def _results(lines: list[dict[str, Any]]) -> list[Result]:
    """The worst regret and the mean of each kind and number of rows, the worst first."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["kind"], line["rows"]), []).append(line)
    results = []
    for (kind, rows), group in groups.items():
        worst = group[0]
        average = exp(mean(log(line["regret"]) for line in group))
        note = f"{worst['outs']}x{worst['ins']}; mean over {len(group)} shapes {average:.3f}"
        results.append(
            Result(f"{kind}, {rows} rows", "worst regret of the chosen tile", "ratio", worst["regret"], notes=note)
        )
    return results
