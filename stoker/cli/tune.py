"""`stoker tune`: measures the fastest kernel tiles for a model on this GPU and stores them for `stoker serve`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.base.allowance import usable_cores
from stoker.base.output import print_message, print_result
from stoker.base.paths import expand_home

if TYPE_CHECKING:
    from stoker.engine.tune import TunedMatmul

NAME = "tune"
HELP = "measure the fastest kernels for a model on this GPU, once"
DESCRIPTION = """Measure the fastest tiles of the matmul kernels for a model on this GPU, and store them in the cache folder.
Every later `stoker serve` and `stoker up` on this machine uses them. Without this command, tiles are predicted from the
shapes of the weights, with measurements of an H200: there, tuning gains a few percent at most; on another GPU it can gain
more. Only the model's config.json is used. It takes one to five minutes, and the GPU should be idle otherwise. A run
that was interrupted continues where it stopped. Experts of MoE models are not tuned."""

_MAX_PROCESSES = 8
_BUSY_BYTES = 2 << 30
_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("model", metavar="MODEL", help="A model folder, a GGUF file or a name on the Hugging Face hub.")
    parser.add_argument(
        "--again", action="store_true", help="Measure all matmuls again, also those that this GPU was tuned for before."
    )
    parser.add_argument(
        "--cache-dir",
        type=expand_home,
        metavar="DIR",
        help="The cache folder, as given to `stoker serve`. The result is a file in its folder `tuning`. "
        "Default: ~/.cache/stoker.",
    )
    parser.add_argument("--offline", action="store_true", help="Download nothing.")


def run(args: argparse.Namespace) -> int:
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from stoker.cli.serving import progress_line
    from stoker.engine.tune import require_gpu

    cache_dir: Path = args.cache_dir or default_cache_dir(os.environ)
    _warn_if_busy(require_gpu())
    folder = resolve_model(args.model, cache_dir, progress_line(), args.offline).path
    # Most of the kernels that are tried will not be used, so they do not go into the cache folder.
    with tempfile.TemporaryDirectory(prefix="stoker-tune-") as compiled:
        os.environ["TRITON_CACHE_DIR"] = compiled
        return _tune(folder, cache_dir / "tuning", args.again)


def _warn_if_busy(used_bytes: int) -> None:
    if used_bytes > _BUSY_BYTES:
        used = f"other processes use {used_bytes / (1 << 30):.0f} GiB of this GPU"
        print_message(f"stoker: {used}; if they use it during the measurement, the result is unreliable", sys.stderr)


def _tune(folder: Path, tuning_dir: Path, again: bool) -> int:
    from stoker.cli.serving import progress_line
    from stoker.engine.tune import compile_jobs, dense_matmuls, tune, tuning_device, tuning_jobs
    from stoker.engine.tuning_file import TuningSystem, UnusableTuning, read_tuning, tuning_path, write_tuning

    device = tuning_device()
    system = TuningSystem.of(device)
    path = tuning_path(tuning_dir, system)
    try:
        tiles = read_tuning(path, system)
    except UnusableTuning as error:
        print_message(f"stoker: {path} is replaced: {error}", sys.stderr)
        tiles = {}
    write_tuning(path, system, tiles)  # an unwritable folder is reported before anything is measured
    jobs = [(key, job) for key, job in tuning_jobs(dense_matmuls(folder), device) if again or key not in tiles]
    progress = progress_line()
    results: list[TunedMatmul] = []
    try:
        for done in compile_jobs(jobs, min(_MAX_PROCESSES, usable_cores())):
            progress("compiling candidates", done, len(jobs))
        for result in tune(jobs):
            results.append(result)
            tiles[result.key] = result.numbers
            write_tuning(path, system, tiles)
            progress("measuring matmuls", len(results), len(jobs))
    except KeyboardInterrupt:
        print_message(
            f"\nstoker: {len(results)} of {len(jobs)} matmuls are tuned; run it again to continue", sys.stderr
        )
        raise
    print_result(_summary(results, path))
    return 0


def _summary(results: list[TunedMatmul], path: Path) -> str:
    """Return the matmuls with the largest gains, and where the tiles are."""
    from stoker.up.terminal import table

    if not results:
        return f"All matmuls of this model are already tuned in {path}. --again measures them again."
    gained = sorted((one for one in results if one.us < one.default_us), key=lambda one: one.us / one.default_us)
    rows = [
        (f"{one.job.outs} x {one.job.ins}", one.job.kind, str(one.job.rows), f"{one.default_us:.1f}", f"{one.us:.1f}")
        for one in gained[:_SHOWN]
    ]
    head = f"Tuned {len(results)} matmuls, {len(gained)} of them with another tile than predicted. The tiles are in {path}."
    return head if not rows else f"{head}\n\n{table(('WEIGHT', 'KIND', 'ROWS', 'US BEFORE', 'US NOW'), rows)}"
