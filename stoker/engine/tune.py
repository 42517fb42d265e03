"""Measures which tiles are the fastest for the weights of a model on this GPU.

Only a model's shapes are needed: weights are random. For each distinct matmul and each class of rows, the tiles with the
shortest predicted times are measured, and the library. A tile replaces the predicted choice only if it is clearly
faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stoker.base.errors import ConfigError
from stoker.engine.model_identity import read_hf_config
from stoker.kernels.dispatch import overlaps
from stoker.kernels.tile_choice import KERNEL, is_library_faster, numbers_of, skinny_tile
from stoker.kernels.tile_model import SkinnyTile
from stoker.kernels.tile_profiles import PROFILES, WEIGHT_BYTES
from stoker.kernels.tile_timing import TileJob, compile_tiles, time_tiles
from stoker.kernels.tuned_tiles import Numbers, TileKey, use_tuned_tiles
from stoker.layers.linear import Linear, TiedLinear
from stoker.models.family import family_of

_MAX_CANDIDATES = 12  # the predictions are good enough that a slower one is not worth compiling
_MIN_GAIN = 1.02  # below this, a difference is noise


@dataclass(frozen=True, slots=True)
class DenseMatmul:
    """A weight shape of a model, and the layers that have it."""

    kind: str
    outs: int
    ins: int
    layers: list[str] = field(compare=False)

    @property
    def name(self) -> str:
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        return f"{self.layers[0]}{more}"


@dataclass(frozen=True, slots=True)
class TunedMatmul:
    """A measured matmul: the tile to use, its time, and the time of the choice without tuning."""

    job: TileJob
    key: TileKey
    tile: SkinnyTile | None
    us: float
    default_us: float

    @property
    def numbers(self) -> Numbers:
        return numbers_of(self.tile)


def require_gpu() -> int:
    """Return how many bytes of the GPU are in use. Raises ConfigError if there is no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("`stoker tune` needs an NVIDIA GPU, and torch finds none; on a CPU there is nothing to tune")
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def tuning_device() -> torch.device:
    """Return the GPU that is tuned: the first visible one."""
    return torch.device("cuda", torch.cuda.current_device())


def dense_matmuls(folder: Path) -> list[DenseMatmul]:
    """Return the distinct matmuls of a model folder that the kernels for few rows can compute."""
    family = family_of(read_hf_config(folder), str(folder / "config.json"))
    with torch.device("meta"):
        model = family.build(64)
    assert isinstance(model, torch.nn.Module)
    found: dict[tuple[str, int, int], DenseMatmul] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and (module.bias is None or module.kind != "bf16"):
            shape = (module.kind, *module.shape)
        elif isinstance(module, TiedLinear):
            shape = ("bf16", *module.shape)
        else:
            continue
        found.setdefault(shape, DenseMatmul(*shape, [])).layers.append(name)
    return list(found.values())


def tuning_jobs(matmuls: Sequence[DenseMatmul], device: torch.device) -> list[tuple[TileKey, TileJob]]:
    """Return what to measure. GPUs older than Hopper have kernels for one row of an unquantised weight only."""
    use_tuned_tiles({})
    is_hopper = overlaps(torch.empty(0, device=device))
    jobs = []
    for matmul in matmuls:
        shape = (matmul.outs, matmul.ins)
        for one in PROFILES[matmul.kind] if is_hopper else PROFILES["bf16"][:1]:
            kind = matmul.kind if is_hopper else "bf16"
            key = TileKey(KERNEL, kind, one.rows, *shape)
            tiles = [tile for _, tile in one.candidates(*shape, WEIGHT_BYTES[kind])[:_MAX_CANDIDATES]]
            library = (None,) if kind == "bf16" and one.rows > 1 else ()
            jobs.append((key, TileJob(kind, one.rows, *shape, (*tiles, *library))))
    return jobs


def compile_jobs(jobs: Sequence[tuple[TileKey, TileJob]], num_processes: int) -> Iterator[int]:
    """Compile all candidates. Yield the number of matmuls done."""
    return compile_tiles([job for _, job in jobs], num_processes)


def tune(jobs: Sequence[tuple[TileKey, TileJob]]) -> Iterator[TunedMatmul]:
    """Measure matmul after matmul."""
    for key, job in jobs:
        try:
            found = time_tiles(job)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"there is not enough GPU memory to time a weight of {job.outs} x {job.ins}; stop other processes on "
                "this GPU"
            ) from error
        finally:
            torch.cuda.empty_cache()
        shape = (job.kind, job.rows, job.outs, job.ins)
        default = None if is_library_faster(*shape) else skinny_tile(*shape)
        times = {tile: us for us, tile in found}
        best_us, best = found[0]
        default_us = times.get(default, float("inf"))
        if default_us < best_us * _MIN_GAIN:
            best_us, best = default_us, default
        yield TunedMatmul(job, key, best, best_us, default_us)
