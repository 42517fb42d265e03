"""The kernels of latent attention on a GPU, against the reference in float64: odd sizes, and the shapes of DeepSeek-V3 and
Kimi K2. Runs under pytest (-m gpu), or as a script without pytest."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from kernels import mla_cases

from stoker.kernels.kv_pages import LARGEST_CODE
from stoker.kernels.mla import LatentShape

CUDA = torch.device("cuda")
KIMI, DEEPSEEK = (LatentShape(heads, 128, 64, 128, 512) for heads in (64, 128))
RANK = LatentShape(16, 128, 64, 128, 512)  # of DeepSeek with --tp 8


def test_odd_sizes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in mla_cases.SHAPES:
            mla_cases.spans_of_all_kinds(shape, CUDA, dtype)
        mla_cases.spans_of_all_kinds(mla_cases.SHAPES[0], CUDA, dtype, block=64)


def test_published_shapes() -> None:
    for shape in (KIMI, DEEPSEEK, RANK):
        for block in (16, 64):
            mla_cases.spans_of_all_kinds(shape, CUDA, torch.bfloat16, block)


def test_entries_of_8_bits() -> None:
    for kv_dtype in LARGEST_CODE:
        for shape in (mla_cases.SHAPES[0], KIMI, DEEPSEEK):
            mla_cases.spans_over_codes(shape, CUDA, torch.bfloat16, 64, kv_dtype)
        mla_cases.exact_codes(KIMI, CUDA, torch.bfloat16, kv_dtype)


def test_a_context_that_ranks_split() -> None:
    for shape, contexts in ((mla_cases.SHAPES[0], 4), (KIMI, 2), (DEEPSEEK, 8)):
        mla_cases.split_spans(shape, contexts, CUDA, torch.bfloat16, length=5000)
        mla_cases.split_codes(shape, contexts, CUDA, torch.bfloat16, torch.float8_e4m3fn, length=5000)


def test_exact_spans() -> None:
    for shape in (mla_cases.SHAPES[0], KIMI, DEEPSEEK):
        mla_cases.exact_spans(shape, CUDA, torch.bfloat16, length=3000)


def test_matmuls_of_heads_and_writing() -> None:
    for num_tokens in (1, 2, 17, 40, 300):
        mla_cases.matmul(num_tokens, CUDA, torch.bfloat16)
    for num_tokens in (7, 40, 300):
        for shape in (mla_cases.SHAPES[0], DEEPSEEK):
            for kv_dtype in (torch.bfloat16, *LARGEST_CODE):
                mla_cases.write(num_tokens, shape, CUDA, torch.bfloat16, kv_dtype)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            torch.manual_seed(0)
            test()
            print(f"{name}: ok", flush=True)
