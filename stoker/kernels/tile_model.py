"""Predicts how long a matmul of few rows takes with a tile, for any shape of the weight. Reading the weight is most of
the work.

A candidate tile has a profile: the rates that its programs achieve on an H200, fitted to measurements over a grid of
weight shapes (`python -m bench run kernel_grid`). The model runs the programs in waves of those that fit on the GPU at
the same time. In a wave, a program has three limits: its own rate, its share of its multiprocessor's, and its share of
the GPU's. So a wave that leaves multiprocessors idle, or programs that are too few to saturate one, cost what they
really cost. No entry belongs to a model: the prediction follows from the weight's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.kernels.dispatch import cdiv

NUM_SMS = 132  # multiprocessors of the GPU that the profiles were measured on
MAX_TILES = 1024  # of a matmul whose inputs are shared between programs, because each tile has a counter
SPLITS = (1, 2, 3, 4, 6, 8)
_MIN_STEPS = 2  # a program that shares its inputs with others still reads at least this many blocks of them
_MAX_PROGRAMS = 10 * NUM_SMS  # beyond this number of programs, sharing the inputs gains nothing
_SHARED_US = 0.5  # the programs that share their inputs wait for each other


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """The tile of one program: outputs and inputs at a time, and its share of all inputs."""

    outs: int
    ins: int
    num_warps: int
    num_stages: int
    splits: int = 1
    fetched: int = 0  # steps whose weights are prefetched while the kernel before still runs


@dataclass(frozen=True, slots=True)
class TileProfile:
    """What the programs of one tile achieve. Rates are in MB of the weight per microsecond."""

    tile: SkinnyTile
    resident: int  # programs that run on one multiprocessor at the same time
    gpu_rate: float
    program_rate: float
    sm_rate: float
    start_us: float
    sum_us: float  # per 1,000 partial sums of one row, where programs share their inputs
    sharpness: float  # how little the three limits add up: large values mean that the slowest one alone decides

    def predicted_us(self, num_outs: int, num_ins: int, splits: int, weight_bytes: float) -> float:
        """Return the time of a matmul with a weight [num_outs, num_ins] of `weight_bytes` per value."""
        tile = self.tile
        num_steps = cdiv(cdiv(num_ins, tile.ins), splits)
        num_programs, slots = cdiv(num_outs, tile.outs) * splits, self.resident * NUM_SMS
        read_mb = tile.outs * tile.ins * num_steps * weight_bytes / 1e6
        full, rest = divmod(num_programs, slots)
        total_us = self.start_us + full * self._wave_us(slots, read_mb) + self._wave_us(rest, read_mb)
        if splits > 1:
            total_us += _SHARED_US + self.sum_us * num_programs * tile.outs / 1e3
        return total_us

    def _wave_us(self, num_programs: int, read_mb: float) -> float:
        """Return the time in which this many programs, which run at the same time, read `read_mb` each."""
        limits = (1 / self.program_rate, cdiv(num_programs, NUM_SMS) / self.sm_rate, num_programs / self.gpu_rate)
        slowest = max(limits) if num_programs else 0.0
        if not slowest:
            return 0.0
        power = self.sharpness
        return float(read_mb * slowest * sum((limit / slowest) ** power for limit in limits) ** (1 / power))


@dataclass(frozen=True, slots=True)
class RowClass:
    """The candidates for matmuls of at most `rows` rows. `library` is the profile of the library's matmul, where it can
    be the fastest; its tile is fictitious."""

    rows: int
    profiles: tuple[TileProfile, ...]
    library: TileProfile | None = None
    splits: tuple[int, ...] = SPLITS  # how many programs may share the inputs of a tile

    def candidates(self, num_outs: int, num_ins: int, weight_bytes: float) -> list[tuple[float, SkinnyTile]]:
        """Return the tiles that can compute a matmul, each with its predicted microseconds, the fastest first."""
        found = [
            (profile.predicted_us(num_outs, num_ins, splits, weight_bytes), number, splits)
            for number, profile in enumerate(self.profiles)
            for splits in self.splits
            if can_split(profile.tile, num_outs, num_ins, splits)
        ]
        return [(us, replace(self.profiles[number].tile, splits=splits)) for us, number, splits in sorted(found)]

    def library_us(self, num_outs: int, num_ins: int, weight_bytes: float) -> float:
        """Return the predicted time of the library's matmul; infinite if the kernels are always as fast."""
        if self.library is None:
            return float("inf")
        return self.library.predicted_us(num_outs, num_ins, 1, weight_bytes)


def can_split(tile: SkinnyTile, num_outs: int, num_ins: int, splits: int) -> bool:
    """Return True if this many programs can share the inputs of a tile, and it can be useful."""
    num_tiles = cdiv(num_outs, tile.outs)
    is_useful = num_tiles * splits <= _MAX_PROGRAMS and num_ins // tile.ins // splits >= _MIN_STEPS
    return splits == 1 or (num_tiles <= MAX_TILES and is_useful)
