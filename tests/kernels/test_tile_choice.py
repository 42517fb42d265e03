"""The tile of a matmul follows from its shape: close to the fastest in measurements, and legal for any shape."""

from __future__ import annotations

import json
from math import exp, log
from pathlib import Path
from statistics import mean

import pytest

from stoker.kernels.tile_choice import KERNEL, is_library_faster, max_rows, row_class, skinny_tile
from stoker.kernels.tile_model import MAX_TILES
from stoker.kernels.tile_profiles import PROFILES
from stoker.kernels.tuned_tiles import TileKey, use_tuned_tiles

# Microseconds on an H200 by source, kind, rows, weight shape and tile, from `python -m bench run kernel_grid`. "best" is
# the fastest of all tiles that were tried, also of those without a profile.
MEASURED = json.loads((Path(__file__).parent / "data" / "matmul_tiles_h200.json").read_text())
# The most that a choice may lose against the fastest tile: on average, and at the worst shape. The profiles were fitted
# without the held-out shapes, except those for one row.
MOST_REGRET = {"fitted": (1.035, 1.26), "held-out": (1.035, 1.25)}
CASES = [
    (source, kind, int(rows))
    for source, kinds in MEASURED.items()
    for kind, by_rows in kinds.items()
    for rows in by_rows
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_tuned_tiles():
    use_tuned_tiles({})
    yield
    use_tuned_tiles({})


@pytest.mark.parametrize(("source", "kind", "rows"), CASES)
def test_choices_are_close_to_the_fastest_measured_tile(source, kind, rows):
    regrets = {}
    for shape, times in MEASURED[source][kind][str(rows)].items():
        num_outs, num_ins = map(int, shape.split("x"))
        tile = skinny_tile(kind, rows, num_outs, num_ins)
        name = f"{tile.outs},{tile.ins},{tile.num_warps},{tile.num_stages},{tile.splits}"
        if is_library_faster(kind, rows, num_outs, num_ins):
            name = "library"
        regrets[shape] = times[name] / times["best"]
    most_mean, most = MOST_REGRET[source]
    assert exp(mean(log(regret) for regret in regrets.values())) <= most_mean, regrets
    assert max(regrets.values()) <= most, regrets


@pytest.mark.parametrize("kind", PROFILES)
@pytest.mark.parametrize("num_outs", [1, 7, 31, 64, 997, 4099, 65_537, 128_256, 1_000_003])
@pytest.mark.parametrize("num_ins", [1, 32, 97, 1_031, 4_096, 28_672, 131_101])
def test_any_shape_gets_a_legal_tile(kind, num_outs, num_ins):
    for num_rows in range(1, max_rows(kind) + 1):
        tile = skinny_tile(kind, num_rows, num_outs, num_ins)
        num_tiles = -(-num_outs // tile.outs)
        assert tile.splits == 1 or num_tiles <= MAX_TILES  # each tile whose inputs are shared has a counter
        assert kind != "bf16" or num_rows > 1 or tile.splits == 1  # the kernel for one row does not share inputs
        assert kind != "blocks" or 128 % tile.ins == 0  # a program reads one scale per step
        assert kind != "int4" or tile.ins == 256  # the codes of 256 inputs stand together
        assert all(number & (number - 1) == 0 for number in (tile.outs, tile.ins, tile.num_warps))
        assert is_library_faster(kind, num_rows, num_outs, num_ins) in (True, False)


def test_the_choice_follows_from_the_shape_alone():
    first = [skinny_tile("bf16", rows, 6144, 4096) for rows in (1, 8, 32, 64)]
    skinny_tile("bf16", 8, 100, 100)
    use_tuned_tiles({})  # forgets what was computed
    assert [skinny_tile("bf16", rows, 6144, 4096) for rows in (1, 8, 32, 64)] == first


def test_tuned_tiles_take_precedence_for_their_shape_only():
    before = skinny_tile("int4", 8, 4096, 4096), skinny_tile("int4", 8, 4096, 14336)
    use_tuned_tiles({TileKey(KERNEL, "int4", row_class("int4", 8).rows, 4096, 4096): (64, 256, 8, 5, 3, 0)})
    tuned = skinny_tile("int4", 3, 4096, 4096)
    assert (tuned.outs, tuned.num_stages, tuned.splits) == (64, 5, 3)
    assert skinny_tile("int4", 8, 4096, 14336) == before[1]
    use_tuned_tiles({})
    assert skinny_tile("int4", 8, 4096, 4096) == before[0]


def test_a_tuned_matmul_can_be_left_to_the_library():
    shape = ("bf16", 8, 4096, 4096)
    assert not is_library_faster(*shape)
    use_tuned_tiles({TileKey(KERNEL, "bf16", 16, 4096, 4096): ()})
    assert is_library_faster(*shape)
    assert skinny_tile(*shape).outs  # a direct call of the kernel still gets a tile
