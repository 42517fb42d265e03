"""The kernels that write and read KV compile for a Hopper GPU, for every dtype of the cache. test_kv_pages.py starts this in
a process of its own: in the others, kernels are interpreted or absent."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels.hopper import SHARED_BYTES, CompiledKernel
from torch import Tensor

from stoker.kernels import paged, rope_write
from stoker.kernels.kv_pages import LARGEST_CODE
from stoker.kernels.pieces import FIELDS

assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is not to be set"
DIM, HEADS, KV_HEADS, BLOCK = 128, 32, 8, 64
CACHES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float32, torch.float16),
]


def new_pages(kv_dtype: torch.dtype) -> Tensor:
    if kv_dtype in LARGEST_CODE:
        return torch.empty(4, BLOCK * (DIM + 2), dtype=torch.uint8).view(kv_dtype)
    return torch.empty(4, BLOCK * DIM, dtype=kv_dtype)


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(("dtype", "kv_dtype"), CACHES)
def test_rope_write(monkeypatch, dtype, kv_dtype):
    kernel = CompiledKernel(rope_write._rope_write)
    monkeypatch.setattr(rope_write, "_rope_write", kernel)
    monkeypatch.setattr(rope_write, "overlaps", lambda x: True)
    heads, angles = torch.empty(16, HEADS + 2 * KV_HEADS, DIM, dtype=dtype), torch.empty(16, DIM)
    slots = integers(16 * KV_HEADS)
    rope_write.rope_write_triton(heads, angles, angles, integers(16), new_pages(kv_dtype), slots, KV_HEADS, None)
    assert kernel.found.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("kv_dtype", list(LARGEST_CODE))
@pytest.mark.parametrize(("kind", "matmul"), [("single", "mma.sync"), ("tile", "wgmma.mma_async")])
def test_attention_over_8_bit_pages(monkeypatch, kind, matmul, kv_dtype):
    kernel = CompiledKernel(getattr(paged, f"attend_{kind}_codes"))
    monkeypatch.setattr(paged, f"attend_{kind}_codes", kernel)
    monkeypatch.setattr(paged, "join_tiles", CompiledKernel(paged.join_tiles))
    monkeypatch.setattr(paged, "overlaps", lambda x: True)
    pieces = {
        "single": [integers(16, FIELDS), integers(0, FIELDS)],
        "tile": [integers(0, FIELDS), integers(16, FIELDS)],
    }
    where = (integers(4, 64), integers(16), integers(16), *pieces[kind], (), paged.new_counters(torch.device("cpu")))
    q = torch.empty(16, HEADS, DIM, dtype=torch.bfloat16)
    spans = paged.PagedSpans(*where, 2 * KV_HEADS, KV_HEADS)
    paged.paged_attention_triton(q, q, q, new_pages(kv_dtype), spans, 1.0)
    ptx = kernel.found.asm["ptx"]
    assert kernel.found.metadata.shared <= SHARED_BYTES
    assert matmul in ptx
    assert ".f16.f16" in ptx
