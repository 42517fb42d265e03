"""The expert kernels on a GPU, against their reference in float64. Runs under pytest (-m gpu), or as a script without
pytest."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from kernels import moe_cases
from kernels.moe_cases import Shape

CUDA = torch.device("cuda")
QWEN_30B_A3B = Shape(2048, 768, 128, 8, granule=64)
ODD = [Shape(72, 40, 5, 3, renormalises=False), Shape(256, 96, 16, 4, granule=96)]


def test_routing() -> None:
    for num_tokens in (1, 7, 33, 2000):
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ODD:
                moe_cases.routing(num_tokens, shape, CUDA, dtype)
        moe_cases.routing(num_tokens, QWEN_30B_A3B, CUDA, torch.bfloat16)


def test_few_tokens() -> None:
    for num_tokens in (1, 3, 4):
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ODD:
                moe_cases.few(num_tokens, shape, CUDA, dtype)
        moe_cases.few(num_tokens, QWEN_30B_A3B, CUDA, torch.bfloat16)


def test_many_tokens() -> None:
    for num_tokens in (5, 64, 300):
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ODD:
                moe_cases.many(num_tokens, shape, CUDA, dtype)
    for num_tokens in (8, 64, 256, 512, 3000):
        moe_cases.many(num_tokens, QWEN_30B_A3B, CUDA, torch.bfloat16)


def test_prompts() -> None:
    for num_tokens in (70, 1000, 3000):
        moe_cases.prompt(num_tokens, Shape(256, 96, 16, 4, granule=32), CUDA, torch.bfloat16)
    for num_tokens in (300, 3000):
        moe_cases.prompt(num_tokens, QWEN_30B_A3B, CUDA, torch.bfloat16)


def test_a_rank_computes_the_experts_that_it_holds() -> None:
    for shape in (*moe_cases.PARTS, replace(QWEN_30B_A3B, first=32, held=32)):
        for num_tokens in (1, 2, 40, 3000):
            moe_cases.whole(num_tokens, shape, CUDA, torch.bfloat16)
    part = replace(QWEN_30B_A3B, first=96, held=32)
    for form in moe_cases.FORMS:
        moe_cases.few_quantised(1, part, form, CUDA, torch.bfloat16)
        for num_tokens in (8, 300):
            moe_cases.many_quantised(num_tokens, part, form, CUDA, torch.bfloat16)


# Few wide experts, narrow ones, an odd number of them, one expert per token, and more than one panel of pairs.
UNUSUAL = [
    Shape(1024, 6400, 3, 2),
    Shape(1000, 512, 8, 2),
    Shape(520, 200, 7, 1),
    Shape(264, 192, 300, 9, renormalises=False),
    Shape(7168, 128, 4, 2),
]


def test_unusual_shapes() -> None:
    for shape in UNUSUAL:
        for num_tokens in (1, 2, 40, 300, 5000):
            moe_cases.whole(num_tokens, shape, CUDA, torch.bfloat16)


def test_routings() -> None:
    for name in moe_cases.ROUTINGS:
        shape = moe_cases.routed(Shape(1024, 256, 64, 8), name)
        for num_tokens in (1, 2, 40, 300):
            moe_cases.whole(num_tokens, shape, CUDA, torch.bfloat16)
            moe_cases.few_quantised(1, shape, "int4 groups of 32", CUDA, torch.bfloat16)


# Rows of an expert that begin in the middle of a block, and inputs that do not fill the last one.
ODD_QUANTISED = [Shape(64, 64, 5, 3, renormalises=False), Shape(320, 96, 16, 4)]


def test_few_tokens_of_quantised_experts() -> None:
    for form in moe_cases.FORMS:
        for num_tokens in (1, 3):
            moe_cases.few_quantised(num_tokens, ODD_QUANTISED[0], form, CUDA, torch.bfloat16)
            moe_cases.few_quantised(num_tokens, QWEN_30B_A3B, form, CUDA, torch.bfloat16)
    moe_cases.few_quantised(1, ODD_QUANTISED[1], "fp8 blocks", CUDA, torch.bfloat16)
    moe_cases.few_quantised(1, ODD_QUANTISED[1], "int4 groups of 32", CUDA, torch.bfloat16)


def test_many_tokens_of_quantised_experts() -> None:
    for form in moe_cases.FORMS:
        for num_tokens in (5, 64, 300):
            moe_cases.many_quantised(num_tokens, ODD_QUANTISED[0], form, CUDA, torch.bfloat16)
        for num_tokens in (8, 64, 300, 3000):
            moe_cases.many_quantised(num_tokens, QWEN_30B_A3B, form, CUDA, torch.bfloat16)
    moe_cases.many_quantised(100, ODD_QUANTISED[1], "fp8 blocks", CUDA, torch.bfloat16)
    moe_cases.many_quantised(100, ODD_QUANTISED[1], "int4 groups of 32", CUDA, torch.bfloat16)


def test_one_weight_may_be_plain() -> None:
    for num_tokens in (1, 7, 2000):
        moe_cases.one_quantised(num_tokens, QWEN_30B_A3B, "int4 groups of 32", CUDA, torch.bfloat16)


def test_both_sides_in_8_bits() -> None:
    for form in ("fp8 channels", "fp8 blocks"):
        for num_tokens in (65, 300, 1000):
            moe_cases.many_in_codes(num_tokens, Shape(256, 128, 8, 2), form, CUDA, torch.bfloat16)
        # Few experts: the reference copies an expert for each pair.
        moe_cases.many_in_codes(70, Shape(2048, 768, 16, 8), form, CUDA, torch.bfloat16)


if __name__ == "__main__":
    failed = 0
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            try:
                torch.manual_seed(0)
                test()
                print(f"{name}: ok", flush=True)
            except Exception as error:
                failed += 1
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
    sys.exit(failed)
