"""Times tiles of the matmuls of few rows on this GPU: for `stoker tune`, and for the benchmark of the choices.

Every weight is copied so often that the L2 cache holds none of the copies, as in a model. A job is one matmul with its
candidate tiles. Compiling them takes far longer than timing them, so other processes can compile them first.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import linear

from stoker.kernels.gpu_timing import graph_s
from stoker.kernels.quant_many import many_rows_linear
from stoker.kernels.quant_skinny import quant_rows_linear
from stoker.kernels.random_weights import bytes_of, make_weight
from stoker.kernels.skinny import few_rows_linear, one_row_linear
from stoker.kernels.tile_model import SkinnyTile

_COLD_BYTES = 300_000_000  # several times the L2 cache
_MAX_COPIES = 100
_COMPILED_OUTS = 1024
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class TileJob:
    """A matmul of `rows` rows and a weight [outs, ins], and the tiles to try. None stands for the library."""

    kind: str
    rows: int
    outs: int
    ins: int
    tiles: tuple[SkinnyTile | None, ...]


def time_tiles(job: TileJob) -> list[tuple[float, SkinnyTile | None]]:
    """Return the microseconds of each tile, the fastest first. Tiles that this GPU cannot run are left out."""
    found = []
    for tile, calls in _calls(job, _COLD_BYTES):
        if _runs(calls[0]):
            found.append((graph_s(calls, _REPEATS) * 1e6, tile))
    return sorted(found, key=lambda one: one[0])


def compile_tiles(jobs: Sequence[TileJob], num_processes: int) -> Iterator[int]:
    """Compile the kernels of all jobs in processes of their own, into Triton's cache. Yield the number of jobs done.

    The number of inputs is compiled into a kernel and the number of outputs is not, so one process compiles all jobs that
    differ only in their outputs.
    """
    ordered = sorted(jobs, key=_compiled_as)
    groups = [list(group) for _, group in groupby(ordered, key=_compiled_as)]
    done = 0
    with multiprocessing.get_context("spawn").Pool(num_processes, _ignore_interrupt) as pool:
        for count in pool.imap_unordered(_compile, groups):
            done += count
            yield done


def _compiled_as(job: TileJob) -> tuple[str, int, int]:
    return job.kind, job.ins, job.rows


def _ignore_interrupt() -> None:
    """Ctrl-C reaches all processes. The first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile(jobs: Sequence[TileJob]) -> int:
    for job in jobs:
        # A small weight of the same alignment compiles to the same kernel.
        small = replace(job, outs=min(job.outs, _COMPILED_OUTS + job.outs % 16))
        for _tile, calls in _calls(small, 0):
            _runs(calls[0])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return len(jobs)


def _runs(call: Callable[[], Any]) -> bool:
    """Return False if the GPU has too little shared memory or too few registers for a tile."""
    from triton.errors import TritonError

    try:
        call()
    except TritonError:
        return False
    return True


def _calls(job: TileJob, cold_bytes: int) -> Iterator[tuple[SkinnyTile | None, list[Callable[[], Any]]]]:
    """Return, for each tile, one call for each copy of the weight."""
    x = torch.randn(job.rows, job.ins, device="cuda", dtype=torch.bfloat16)
    weights = [make_weight(job.kind, job.outs, job.ins)]
    num_more = min(_MAX_COPIES, max(1, cold_bytes // bytes_of(weights[0]))) if cold_bytes else 0
    weights += [make_weight(job.kind, job.outs, job.ins) for _ in range(num_more)]
    is_plain = job.kind == "bf16"
    kernel: Any = quant_rows_linear if not is_plain else one_row_linear if job.rows == 1 else few_rows_linear
    library: Any = linear if is_plain else many_rows_linear
    for tile in job.tiles:
        run = library if tile is None else partial(kernel, tile=tile)
        yield tile, [partial(run, x, weight) for weight in weights]
