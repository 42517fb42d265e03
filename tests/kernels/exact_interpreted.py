"""Runs the kernels of numerics=exact on a CPU. test_exact_kernels.py starts this in a process of its own, like
interpreted.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels import exact_cases
from kernels.moe_cases import Shape

from stoker.kernels import exact_pieces
from stoker.kernels.exact_tiles import ExactTiles
from stoker.kernels.reach import Reach
from stoker.kernels.tile_model import SkinnyTile

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"
CPU = torch.device("cpu")


def matmul_in_order(a, b, dtype):
    """Multiply matrices like a GPU's tensor cores: a result does not depend on its place in the tile. The BLAS library
    that numpy calls adds up the last rows of a tile in another order than the first ones, on some CPUs."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k, None].astype(dtype) * b[..., k, None, :].astype(dtype)
    return total


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(np, "matmul", matmul_in_order)  # the interpreter's tl.dot
    # Small parts of the keys, so that short contexts have several.
    monkeypatch.setattr(exact_pieces, "_FIRST_KEYS", 32)
    exact_pieces.part_ends.cache_clear()


@pytest.mark.parametrize(("num_heads", "kv_heads", "dim"), [(4, 1, 16), (6, 2, 16), (16, 1, 16)])
def test_verified_attention(num_heads, kv_heads, dim):
    exact_cases.verified_attention(num_heads, kv_heads, dim, CPU, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float8_e4m3fn), (torch.float16, torch.int8), (torch.float16, torch.float16)],
)
def test_verified_attention_of_other_types(dtype, kv_dtype):
    exact_cases.verified_attention(3, 1, 16, CPU, dtype, kv_dtype, (75, 45))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_chunks_of_prompts(kv_dtype):
    exact_cases.chunked_attention(3, 1, 16, CPU, torch.float32, kv_dtype)


REACHES = [Reach(window=1), Reach(chunk=7), Reach(window=40), Reach(chunk=32)]


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_local_attention(reach):
    exact_cases.verified_attention(3, 1, 16, CPU, torch.float16, None, (75, 45), False, reach, True)
    exact_cases.chunked_attention(3, 1, 16, CPU, torch.float16, None, reach, True)


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_drafts_in_local_attention_without_exact(reach, kv_dtype):
    exact_cases.fast_verified_attention(6, 2, 16, CPU, torch.float32, kv_dtype, reach, True)


def test_drafts_without_exact():
    exact_cases.fast_verified_attention(6, 2, 16, CPU, torch.float32)


COUNTS = [1, 2, 3, 5, 17, 64, 70, 140]
# Like those of a weight on Hopper: the split is the same, the numbers of outputs are not. The inputs of a step are, because
# the interpreter adds them up in an order of its own.
SPLIT = ExactTiles(
    (
        (16, SkinnyTile(32, 64, 4, 2, splits=3)),
        (64, SkinnyTile(64, 64, 4, 2, splits=3)),
        (128, SkinnyTile(32, 64, 4, 2, splits=3)),
    ),
    SkinnyTile(64, 64, 4, 2, splits=3),
    many_rows=32,
)
QUANT_SPLIT = ExactTiles(
    ((16, SkinnyTile(64, 128, 4, 2, splits=2)), (64, SkinnyTile(32, 128, 4, 2, splits=2))),
    SkinnyTile(32, 128, 4, 2, splits=2),
    many_rows=32,
)


@pytest.mark.parametrize(("dtype", "add", "tiles"), [(torch.float32, True, SPLIT), (torch.float16, False, None)])
def test_matmul(dtype, add, tiles):
    exact_cases.exact_matmul(70, 384, CPU, dtype, COUNTS, tiles, add)


def test_quantised_matmul():
    exact_cases.exact_quant_matmul(40, 512, CPU, torch.float32, [1, 17, 70], QUANT_SPLIT)


def test_experts():
    exact_cases.exact_experts(Shape(72, 40, 3, 2, renormalises=False), CPU, torch.float32, [1, 2, 17, 30])


@pytest.mark.parametrize(("form", "in_codes"), [("fp8 blocks", True), ("int4 groups of 32", False)])
def test_quantised_experts(form, in_codes):
    exact_cases.exact_experts(Shape(256, 128, 3, 2, granule=128), CPU, torch.float32, [1, 2, 20], form, in_codes)
