"""Every shape of a layer of experts gets a tile that a Hopper GPU can run, and one close to the fastest measured."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
import torch

from stoker.base.errors import ModelFilesError
from stoker.kernels.dispatch import is_power_of_2
from stoker.kernels.moe_prompt import GRANULE
from stoker.kernels.moe_tile_model import (
    MAX_EXPERTS,
    MAX_HIDDEN,
    MAX_TOP_K,
    PROMPT_LOAD,
    Format,
    PairTile,
    Side,
    check_experts,
    few_tile,
    list_warps,
    pair_tile,
    router_tile,
)

SHARED_BYTES = 227 << 10  # of a program on Hopper
MAX_REGISTERS = 192  # of a thread, for sums: the rest are for addresses and operands
FORMATS: tuple[Format, ...] = get_args(Format)
SIDES: tuple[Side, ...] = get_args(Side)
# Bytes of a weight's and an input's value.
BYTES: dict[str, tuple[float, int]] = {
    "float32": (4, 4), "plain": (2, 2), "prompt": (2, 2), "fp8": (1, 2), "codes": (1, 1), "code blocks": (1, 1),
    "int4": (0.5, 2),
}  # fmt: skip
TIMES = json.loads(Path(__file__).with_name("moe_tile_times.json").read_text())


def random_shapes(seed: int, count: int) -> list[tuple[int, int, int, int, int]]:
    print(f"seed {seed}")
    numbers = random.Random(seed)
    shapes = []
    for _ in range(count):
        experts = numbers.choice([1, 2, 3, 8, 16, 60, 64, 128, 160, 256, 384, 512, 1000])
        top_k = numbers.randint(1, min(experts, 16))
        tokens = int(2 ** numbers.uniform(0, 13))
        shapes.append((tokens, experts, top_k, numbers.randint(1, 1024) * 8, numbers.randint(1, 3000) * 8))
    return shapes


def legal(form: Format, side: Side, tile: PairTile) -> None:
    numbers = (tile.rows, tile.outs, tile.ins, tile.num_warps)
    assert all(is_power_of_2(number) for number in numbers), tile
    assert tile.rows >= 16, tile
    assert tile.ins >= (256 if form == "int4" else 32), tile
    assert form not in ("fp8", "codes", "code blocks") or tile.ins <= 128, "a scale covers 128 inputs"
    assert form != "prompt" or tile.outs % GRANULE == 0, tile
    weight_rows = tile.outs * (2 if side == "gate_up" else 1)
    of_weight, of_input = BYTES[form]
    # A loop step of 4-bit weights reads the inputs in pieces of 32.
    stage = weight_rows * tile.ins * of_weight + tile.rows * (32 if form == "int4" else tile.ins) * of_input
    assert stage * tile.num_stages <= SHARED_BYTES, tile
    sums = tile.rows * weight_rows // (tile.num_warps * 32) * (2 if form == "code blocks" else 1)
    assert sums <= MAX_REGISTERS, tile
    assert tile.panel >= 1


@pytest.mark.parametrize("form", FORMATS)
def test_any_shape_gets_a_legal_tile(form: Format) -> None:
    for tokens, experts, top_k, hidden, width in random_shapes(20, 200):
        for side, outs in zip(SIDES, (width, hidden), strict=True):
            legal(form, side, pair_tile(form, side, tokens * top_k, experts, outs, hidden + width - outs))


def test_the_unrolled_loop_for_one_token_is_short() -> None:
    for form in ("plain", "fp8", "int4"):
        for width in (8, 768, 1408, 2880, 6400, 8192, 14336, 65536):
            tile = few_tile(form, "down", 4096, width)
            assert -(-width // tile.ins) <= 32
            assert tile.outs * tile.ins // (tile.num_warps * 32) <= MAX_REGISTERS or width > 1 << 15


def test_the_router_gives_every_multiprocessor_work_where_it_can() -> None:
    for tokens in (65, 300, 1000, 2048, 4096, 8192):
        for experts in (1, 8, 16, 60, 128, 512):
            tile = router_tile(tokens, experts, 2)
            programs = -(-tokens // tile.rows) * -(-experts // tile.outs) * tile.splits
            assert programs >= 64 or tile.splits == 8
    assert list_warps(100) == 1
    assert list_warps(MAX_HIDDEN) == 8


def test_few_outputs_take_a_smaller_tile_than_many() -> None:
    many, few = (pair_tile("plain", "gate_up", 8 * 64, 8, outs, 1024) for outs in (14336, 512))
    assert few.rows < many.rows


def _cases() -> dict[tuple[object, ...], dict[tuple[object, ...], float]]:
    """Return the times by tile and kernel, for each shape, format, number of tokens and side."""
    found: dict[tuple[object, ...], dict[tuple[object, ...], float]] = defaultdict(dict)
    for hidden, width, experts, top_k, form, tokens, side, tile, us in TIMES:
        family = "plain" if form == "prompt" else form
        found[hidden, width, experts, top_k, family, tokens, side][(form, *tile)] = us
    return found


def test_the_choice_is_close_to_the_fastest_tile_measured() -> None:
    regrets = []
    for (hidden, width, experts, top_k, family, tokens, side), times in _cases().items():
        pairs = tokens * top_k
        form: Format = "prompt" if family == "plain" and pairs >= PROMPT_LOAD * experts else family
        outs, ins = (width, hidden) if side == "gate_up" else (hidden, width)
        tile = pair_tile(form, side, pairs, experts, outs, ins)
        chosen = times.get((form, tile.rows, tile.outs, tile.ins, tile.num_warps, tile.num_stages))
        where = f"{form} {side} of {experts} experts, {hidden} x {width}, top {top_k}, at {tokens} tokens: {tile}"
        assert chosen is not None, f"not measured: {where}"
        regrets.append((chosen / min(times.values()), where))
    worst = max(regrets)
    assert worst[0] <= 1.21, worst
    mean = sum(regret for regret, _ in regrets) / len(regrets)
    assert mean <= 1.01, mean


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "width", "limit"),
    [
        (MAX_EXPERTS + 1, 8, 2048, 768, "num_experts is 4097"),
        (128, MAX_TOP_K + 1, 2048, 768, "num_experts_per_tok is 65"),
        (128, 8, MAX_HIDDEN + 8, 768, "hidden_size is 65544"),
        (8, 2, 32768, 32768, "an expert's gate and up is 2147483648"),
    ],
)
def test_a_shape_that_no_kernel_serves_names_the_layer_and_the_limit(experts, top_k, hidden, width, limit) -> None:
    shape = ("layers.3.mlp", experts, top_k, hidden, width)
    with pytest.raises(ModelFilesError, match=f"layers.3.mlp: .*{limit}.* at most"):
        check_experts(*shape, torch.device("cuda"))
    check_experts(*shape, torch.device("cpu"))


def test_published_shapes_are_served() -> None:
    for shape in ((8, 2, 4096, 14336), (384, 8, 7168, 2048), (512, 10, 2048, 512), (16, 1, 5120, 8192)):
        check_experts("layers.0.mlp", *shape, torch.device("cuda"))
