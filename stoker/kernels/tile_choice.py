"""Chooses the tile of a matmul of few rows: the tuned one (tuned_tiles.py), or the fastest by prediction (tile_model.py).

A choice depends on the weight's kind and shape and on the number of rows, never on what ran before. It is computed once
and cached; captured steps contain it.
"""

from __future__ import annotations

from dataclasses import astuple

from stoker.kernels.tile_model import RowClass, SkinnyTile
from stoker.kernels.tile_profiles import PROFILES, WEIGHT_BYTES
from stoker.kernels.tuned_tiles import CHECKS, Numbers, TileKey, cached_choice, tuned_tile

KERNEL = "dense"  # the name of these matmuls among the tuned tiles


def row_class(kind: str, num_rows: int) -> RowClass:
    """Return the candidates for a number of rows. More rows than the last class has are a mistake of the caller."""
    return next(one for one in PROFILES[kind] if num_rows <= one.rows)


def max_rows(kind: str) -> int:
    """Return the largest number of rows for which the kernels for few rows are used."""
    return PROFILES[kind][-1].rows


@cached_choice
def skinny_tile(kind: str, num_rows: int, num_outs: int, num_ins: int) -> SkinnyTile:
    """Return the tile for a weight [num_outs, num_ins]."""
    candidates = row_class(kind, num_rows)
    tuned = tuned_tile(TileKey(KERNEL, kind, candidates.rows, num_outs, num_ins))
    if tuned:
        return SkinnyTile(*tuned)
    return candidates.candidates(num_outs, num_ins, WEIGHT_BYTES[kind])[0][1]


@cached_choice
def is_library_faster(kind: str, num_rows: int, num_outs: int, num_ins: int) -> bool:
    """Return True if the library's matmul is faster than the kernels for few rows."""
    candidates = row_class(kind, num_rows)
    tuned = tuned_tile(TileKey(KERNEL, kind, candidates.rows, num_outs, num_ins))
    if tuned is not None:
        return not tuned
    shape = (num_outs, num_ins, WEIGHT_BYTES[kind])
    return candidates.library_us(*shape) < candidates.candidates(*shape)[0][0]


def numbers_of(tile: SkinnyTile | None) -> Numbers:
    """Return a tile as it is stored among the tuned ones. None stands for the library."""
    return () if tile is None else astuple(tile)


def _is_candidate(key: TileKey, numbers: Numbers) -> bool:
    classes = {one.rows: one for one in PROFILES.get(key.kind, ())}
    if key.rows not in classes:
        return False
    if not numbers:
        return key.kind == "bf16" and key.rows > 1
    candidates = classes[key.rows].candidates(key.outs, key.ins, WEIGHT_BYTES[key.kind])
    return numbers in (numbers_of(tile) for _, tile in candidates)


CHECKS[KERNEL] = _is_candidate
