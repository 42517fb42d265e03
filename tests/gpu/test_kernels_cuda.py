"""The Triton kernels on a GPU, against their references in float64. Runs under pytest (-m gpu), or as a script without
pytest."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from kernels import cases, quant_cases

from stoker.kernels.dense import has_dense
from stoker.kernels.reach import FULL, Reach
from stoker.kernels.rope_write import Temperature

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float32)


def test_norm_and_gate() -> None:
    for dtype in DTYPES:
        for shape in [(1, 64), (7, 576), (33, 100), (1000, 4096), (3, 28672)]:
            cases.norm(shape, CUDA, dtype)
            cases.gated(shape, CUDA, dtype)


def test_skinny() -> None:
    for dtype in DTYPES:
        for num_in, num_out in [(64, 16), (100, 34), (4096, 6144), (14336, 4096)]:
            for num_rows in (1, 7, 40):
                cases.skinny(num_rows, num_in, num_out, CUDA, dtype)


def test_quantised_weights() -> None:
    for num_rows, num_in, num_out in [(1, 96, 34), (40, 4096, 6144)]:
        quant_cases.dequantised(num_in, num_out, CUDA, torch.bfloat16)
        quant_cases.products(num_rows, num_in, num_out, CUDA, torch.bfloat16)
    for num_rows, num_in, num_out in [(67, 96, 34), (70, 4096, 6144), (301, 512, 1280)]:
        quant_cases.many_rows(num_rows, num_in, num_out, CUDA)
    for num_rows, num_in, group in [(1, 4096, 4096), (300, 14336, 14336), (33, 4096, 128)]:
        quant_cases.quantised(num_rows, num_in, group, CUDA, torch.bfloat16, 0.003)


def test_rope_write() -> None:
    for dtype in DTYPES:
        for num_heads, kv_heads, dim in [(6, 2, 32), (9, 3, 64), (32, 8, 128)]:
            for num_tokens in (1, 5, 300):
                for has_norm in (False, True):
                    cases.rope(num_tokens, num_heads, kv_heads, dim, has_norm, CUDA, dtype)


def test_rope_write_rounds_to_the_dtype_of_the_cache() -> None:
    for dtype, kv_dtype in [
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int8),
        (torch.float32, torch.int8),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ]:
        for num_heads, kv_heads, dim in [(9, 3, 64), (32, 8, 128), (4, 4, 256)]:
            cases.rope(300, num_heads, kv_heads, dim, True, CUDA, dtype, kv_dtype)


MIXED = [
    [(0, 1)],
    [(36, 1), (0, 0), (15, 1), (63, 1), (64, 1), (300, 1)],
    [(5000, 1)],
    [(0, 2), (0, 133), (40, 3), (31, 64), (700, 200)],
    [(5, 1), (0, 1400), (77, 1), (0, 0), (130, 9)],
    [(200 + 7 * i, 1) for i in range(256)],
]


def test_attention() -> None:
    for num_heads, kv_heads, dim, block_tokens in [(32, 8, 128, 64), (9, 3, 64, 64)]:
        for lengths in MIXED:
            cases.attention(lengths, num_heads, kv_heads, dim, block_tokens, CUDA, torch.bfloat16)
    for lengths in MIXED[-2:]:
        cases.attention(lengths, 6, 2, 32, 16, CUDA, torch.float32)


def test_attention_over_8_bit_pages() -> None:
    for num_heads, kv_heads, dim, block_tokens in [(32, 8, 128, 64), (9, 3, 64, 64), (16, 1, 256, 64)]:
        for lengths in MIXED:
            cases.attention(lengths, num_heads, kv_heads, dim, block_tokens, CUDA, torch.bfloat16, torch.int8)
    for lengths in MIXED[-2:]:
        cases.attention(lengths, 32, 8, 128, 64, CUDA, torch.bfloat16, torch.float8_e4m3fn)
        cases.attention(lengths, 32, 8, 128, 64, CUDA, torch.float16, torch.float8_e4m3fn)
        cases.attention(lengths, 6, 2, 32, 16, CUDA, torch.float32, torch.int8)
        cases.attention(lengths, 6, 2, 32, 16, CUDA, torch.float32, torch.bfloat16)


def test_local_attention_and_sinks() -> None:
    """The shapes of gpt-oss and Llama 4, and odd ones."""
    for reach in (Reach(window=128), Reach(chunk=1000), Reach(window=1), FULL):
        for lengths in MIXED:
            cases.attention(lengths, 64, 8, 64, 64, CUDA, torch.bfloat16, None, reach, True)
            cases.attention(lengths, 40, 8, 128, 64, CUDA, torch.bfloat16, torch.int8, reach)
    cases.attention(MIXED[4], 6, 2, 32, 16, CUDA, torch.float32, None, Reach(chunk=100), True)


def test_heads_that_are_not_rotated() -> None:
    for has_norm in (False, True):
        cases.rope(300, 40, 8, 128, has_norm, CUDA, torch.bfloat16, None, False, Temperature(0.1, 100))


def test_dense_attention() -> None:
    if not has_dense(torch.empty(0, device=CUDA, dtype=torch.bfloat16)):
        return  # this GPU has no such kernel
    for count, num_heads, kv_heads, dim in [(2048, 32, 8, 128), (4096, 6, 2, 64)]:
        cases.dense(count, num_heads, kv_heads, dim, CUDA, torch.bfloat16)


def test_step_inputs() -> None:
    for count, kv_heads in [(1, 1), (5, 3), (256, 8)]:
        cases.inputs(count, kv_heads, 64, CUDA)


def test_verification_of_drafts() -> None:
    assert cases.drafts(256, CUDA)


def test_sampling() -> None:
    for seed, (vocab, dtype) in enumerate([(2, torch.float32), (997, torch.float32), (128256, torch.bfloat16)]):
        cases.sampling(40, vocab, seed, CUDA, dtype)


if __name__ == "__main__":
    failed, wanted = 0, sys.argv[1:]
    for name, test in list(globals().items()):
        if name.startswith("test_") and (not wanted or name in wanted):
            try:
                torch.manual_seed(0)
                test()
                print(f"{name}: ok", flush=True)
            except Exception as error:
                failed += 1
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
    sys.exit(failed)
