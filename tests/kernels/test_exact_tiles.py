"""The tiles of numerics=exact split a weight's inputs at the same places for every number of rows, and cost little."""

from __future__ import annotations

import pytest

from stoker.kernels.exact_tiles import exact_tiles, exact_us, fast_us, part_size

SHAPES = {
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "30B-A3B": [(5120, 2048), (2048, 4096), (151936, 2048)],
    "SmolLM2": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "70B": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
    "odd": [(1, 32), (7, 96), (1000, 712), (130, 100_000)],
}
ALL = [shape for shapes in SHAPES.values() for shape in shapes]


@pytest.mark.parametrize("kind", ["bf16", "fp8", "blocks", "int4"])
@pytest.mark.parametrize(("num_outs", "num_ins"), ALL)
def test_all_numbers_of_rows_have_one_split_and_one_instruction(kind: str, num_outs: int, num_ins: int) -> None:
    tiles = exact_tiles(kind, num_outs, num_ins)
    rows = [rows for rows, _ in tiles.few]
    assert rows == sorted(set(rows))
    assert rows[-1] >= 128
    assert tiles.for_rows(rows[-1] + 1) is None
    for tile in (*(tile for _, tile in tiles.few), tiles.many):
        assert tile.splits == tiles.many.splits
        assert part_size(num_ins, tile, tile.splits) == part_size(num_ins, tiles.many, tile.splits)
        assert tile.outs >= 64
        assert tile.num_warps % 4 == 0


@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize("model", ["8B", "30B-A3B", "SmolLM2"])
@pytest.mark.parametrize("rows", [2, 16, 32, 64])
def test_a_layer_is_predicted_to_cost_at_most_3_percent_more(kind: str, model: str, rows: int) -> None:
    exact, fast = (sum(predict(kind, rows, *shape) for shape in SHAPES[model]) for predict in (exact_us, fast_us))
    assert exact <= 1.03 * fast
