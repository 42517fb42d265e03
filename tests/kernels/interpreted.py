"""Runs the Triton kernels on a CPU. test_interpreted.py starts this in a process of its own: whether kernels are
interpreted is decided when Triton is imported. The interpreter computes bfloat16 matmuls wrongly, so float32 and
float16 are used."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels import cases

from stoker.kernels import sample_rows
from stoker.kernels.reach import FULL, Reach
from stoker.kernels.rope_write import Temperature

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (33, 100)])
def test_norm_and_gate(shape, dtype):
    cases.norm(shape, CPU, dtype)
    cases.gated(shape, CPU, dtype)


@pytest.mark.parametrize(("num_in", "num_out"), [(64, 16), (100, 34), (1088, 70)])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_skinny(num_rows, num_in, num_out):
    cases.skinny(num_rows, num_in, num_out, CPU, torch.float32)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "kv_heads", "dim"), [(6, 2, 32), (9, 3, 64), (4, 4, 16)])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_rope_write(num_tokens, num_heads, kv_heads, dim, has_norm):
    cases.rope(num_tokens, num_heads, kv_heads, dim, has_norm, CPU, torch.float32)


@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_that_are_not_rotated(has_norm):
    cases.rope(9, 6, 2, 32, has_norm, CPU, torch.float32, None, False)
    cases.rope(9, 6, 2, 32, has_norm, CPU, torch.float32, None, has_norm, Temperature(0.4, 100))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8, torch.float16])
@pytest.mark.parametrize(("num_tokens", "num_heads", "kv_heads", "dim"), [(5, 6, 2, 32), (3, 9, 3, 64)])
def test_rope_write_rounds_to_the_dtype_of_the_cache(num_tokens, num_heads, kv_heads, dim, kv_dtype):
    cases.rope(num_tokens, num_heads, kv_heads, dim, True, CPU, torch.float32, kv_dtype)


@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(36, 1), (0, 0), (15, 1), (16, 1), (200, 1)],
        [(0, 2), (0, 33), (40, 3), (31, 16)],
        [(5, 1), (0, 140), (77, 1), (0, 0), (130, 9)],
    ],
)
@pytest.mark.parametrize(("num_heads", "kv_heads", "dim"), [(6, 2, 16), (3, 1, 32)])
def test_attention(lengths, num_heads, kv_heads, dim):
    cases.attention(lengths, num_heads, kv_heads, dim, 16, CPU, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float8_e4m3fn), (torch.float32, torch.int8), (torch.float16, torch.float8_e4m3fn)],
)
@pytest.mark.parametrize("lengths", [[(36, 1), (0, 0), (200, 1)], [(5, 1), (0, 60), (130, 9)]])
def test_attention_over_8_bit_pages(lengths, dtype, kv_dtype):
    cases.attention(lengths, 6, 2, 16, 16, CPU, dtype, kv_dtype)


# Odd ones first: a window of one key, a chunk smaller than a block, borders within and between blocks.
REACHES = [Reach(window=1), Reach(chunk=5), Reach(window=17), Reach(chunk=48), Reach(window=64), Reach(chunk=4096)]
LOCAL_LENGTHS = [(36, 1), (0, 0), (15, 1), (48, 1), (200, 1), (47, 1), (0, 140), (130, 9), (40, 20)]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_local_attention(reach, has_sinks):
    cases.attention(LOCAL_LENGTHS, 6, 2, 16, 16, CPU, torch.float32, None, reach, has_sinks)


@pytest.mark.parametrize("reach", [Reach(window=17), Reach(chunk=48), FULL], ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])
def test_local_attention_over_8_bit_pages(reach, kv_dtype):
    cases.attention(LOCAL_LENGTHS[:7], 6, 2, 16, 16, CPU, torch.float32, kv_dtype, reach, True)


def test_sinks_of_attention_over_all_keys():
    cases.attention(
        [(36, 1), (0, 0), (200, 1), (0, 2), (0, 60), (130, 9)], 3, 1, 32, 16, CPU, torch.float16, None, FULL, True
    )


def test_attention_over_16_bit_pages():
    cases.attention([(36, 1), (0, 40), (130, 9)], 3, 1, 32, 16, CPU, torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("count", "kv_heads"), [(1, 1), (5, 3), (60, 2)])
def test_step_inputs(count, kv_heads):
    cases.inputs(count, kv_heads, 16, CPU)


@pytest.mark.parametrize("num_spans", [1, 30])
def test_verification_of_drafts(num_spans):
    assert cases.drafts(num_spans, CPU) > 0 or num_spans == 1


@pytest.mark.parametrize(("vocab", "block", "many_rows"), [(2, 8192, 64), (50, 32, 64), (700, 128, 3)])
def test_sampling(vocab, block, many_rows, monkeypatch):
    """Rows as one block, as several, and as several chunks of several blocks."""
    monkeypatch.setattr(sample_rows, "_BLOCK", block)
    monkeypatch.setattr(sample_rows, "_MANY_ROWS", many_rows)
    assert cases.sampling(4, vocab, vocab, CPU)
    assert cases.sampling(4, vocab, vocab + 1, CPU, torch.bfloat16)


@pytest.mark.parametrize(("num_kib", "piece_kib"), [(1, 4), (5, 4), (8, 4), (3, 3)])
def test_xxh3(num_kib, piece_kib):
    cases.xxh3(3, num_kib, piece_kib, CPU)
