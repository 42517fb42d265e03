"""Chooses the tiles of a matmul whose rows must not depend on the number of rows (exact_rows.py).

What decides a row's bits is where the inputs are split, and which instruction of the tensor cores adds them up: Hopper's
wgmma, which takes at least 64 outputs, or the older mma. So one weight has one split for all numbers of rows, and only
tiles of at least 64 outputs and four warps. Among the splits, the one is taken whose predicted time (tile_model.py) is
closest to that of the tiles without this constraint, in the worst of the classes of up to 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from stoker.kernels.dispatch import cdiv
from stoker.kernels.tile_model import RowClass, SkinnyTile, can_split
from stoker.kernels.tile_profiles import PROFILES, WEIGHT_BYTES

# For several rows of float32, and for GPUs older than Hopper: one tile for all numbers of rows.
_SMALL = SkinnyTile(outs=32, ins=64, num_warps=4, num_stages=2)
_WGMMA_OUTS, _WGMMA_WARPS = 64, 4
# Tiles for more than 64 rows, and for any number of rows, by the kind of the weight. Not yet benchmarked.
_MORE_ROWS: dict[str, dict[int, SkinnyTile]] = {
    "bf16": {128: SkinnyTile(128, 64, 8, 4, fetched=1), 256: SkinnyTile(128, 64, 8, 4, fetched=1)},
    "fp8": {128: SkinnyTile(64, 128, 4, 3)},
    "blocks": {128: SkinnyTile(128, 128, 8, 3)},
    "int4": {128: SkinnyTile(128, 256, 8, 2)},
}
_MANY_ROWS: dict[str, SkinnyTile] = {
    "bf16": SkinnyTile(128, 64, 8, 4),
    "fp8": SkinnyTile(128, 128, 8, 3),
    "blocks": SkinnyTile(128, 128, 8, 3),
    "int4": SkinnyTile(128, 256, 8, 2),
}
MANY_ROWS_TILE = 128  # rows of one program, where each program has all inputs
_SPLITS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class ExactTiles:
    """The tiles of one weight. All have the same split of the inputs."""

    few: tuple[tuple[int, SkinnyTile], ...]  # by the largest number of rows, in ascending order
    many: SkinnyTile  # for more rows; a program adds up the parts by itself
    many_rows: int = MANY_ROWS_TILE

    def for_rows(self, num_rows: int) -> SkinnyTile | None:
        """Return the tile for few rows, or None: then `many` is used."""
        return next((tile for rows, tile in self.few if num_rows <= rows), None)


SMALL_TILES = ExactTiles(((64, _SMALL),), _SMALL, 64)


@cache
def exact_tiles(kind: str, num_outs: int, num_ins: int) -> ExactTiles:
    """Return the tiles for a weight [num_outs, num_ins] on Hopper."""
    choices: dict[tuple[float, float, int], list[tuple[int, SkinnyTile]]] = {}
    for splits in _SPLITS:
        tiles, ratios = [], []
        for one in _classes(kind):
            for us, tile in _fastest(one, kind, num_outs, num_ins, splits):
                tiles.append((one.rows, tile))
                ratios.append(us / fast_us(kind, one.rows, num_outs, num_ins))
        if len(tiles) == len(_classes(kind)):
            choices[max(ratios), sum(ratios), splits] = tiles
    best = min(choices)
    few, splits = choices[best], best[2]
    few += [(rows, replace(tile, splits=splits)) for rows, tile in _MORE_ROWS[kind].items()]
    return ExactTiles(tuple(few), replace(_MANY_ROWS[kind], splits=splits))


def part_size(num_ins: int, tile: SkinnyTile, splits: int) -> int:
    """Return the number of inputs of a part, as the kernels compute it. Beyond the last input, they add zeros."""
    return min(num_ins, cdiv(cdiv(num_ins, tile.ins), splits) * tile.ins)


def fast_us(kind: str, rows: int, num_outs: int, num_ins: int) -> float:
    """Return the predicted time for this many rows without the constraint, the library's included."""
    one = next(one for one in PROFILES[kind] if rows <= one.rows)
    shape = (num_outs, num_ins, WEIGHT_BYTES[kind])
    return min(one.candidates(*shape)[0][0], one.library_us(*shape))


def exact_us(kind: str, rows: int, num_outs: int, num_ins: int) -> float:
    """Return the predicted time for at most 64 rows."""
    tile = exact_tiles(kind, num_outs, num_ins).for_rows(rows)
    assert tile is not None
    one = next(one for one in _classes(kind) if rows <= one.rows)
    profile = next(profile for profile in one.profiles if replace(tile, splits=1) == profile.tile)
    return profile.predicted_us(num_outs, num_ins, tile.splits, WEIGHT_BYTES[kind])


def _classes(kind: str) -> list[RowClass]:
    """Return the classes of rows, each with the profiles of tiles that wgmma can compute. A class without any has those
    of the next."""
    found: list[RowClass] = []
    for one in reversed([one for one in PROFILES[kind] if one.rows > 1]):
        usable = tuple(
            profile
            for profile in one.profiles
            if profile.tile.outs >= _WGMMA_OUTS and profile.tile.num_warps % _WGMMA_WARPS == 0
        )
        found.insert(0, replace(one, profiles=usable or found[0].profiles))
    return found


def _fastest(one: RowClass, kind: str, num_outs: int, num_ins: int, splits: int) -> Iterator[tuple[float, SkinnyTile]]:
    """Yield the fastest tile of a class with this split, with its predicted microseconds, if there is any."""
    part = part_size(num_ins, _MANY_ROWS[kind], splits)
    times = [
        (profile.predicted_us(num_outs, num_ins, splits, WEIGHT_BYTES[kind]), number)
        for number, profile in enumerate(one.profiles)
        if splits in one.splits
        and can_split(profile.tile, num_outs, num_ins, splits)
        and part_size(num_ins, profile.tile, splits) == part
    ]
    if times:
        us, number = min(times)
        yield us, replace(one.profiles[number].tile, splits=splits)
