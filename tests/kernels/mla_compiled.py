"""The kernels of latent attention compile for a Hopper GPU with the shapes of DeepSeek-V3 and Kimi K2, use its tensor cores
and fit its shared memory. test_mla_kernels.py starts this in a process of its own."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels.hopper import SHARED_BYTES, CompiledKernel

from stoker.kernels import head_matmul, latent_write, mla, mla_split, split_parts
from stoker.kernels.block_split import BlockSplit
from stoker.kernels.kv_pages import LARGEST_CODE
from stoker.kernels.linear import Norm
from stoker.kernels.mla import LatentShape
from stoker.kernels.paged import PagedSpans, SpanForm
from stoker.kernels.pieces import FIELDS

assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is not to be set"
BLOCK, TOKENS = 64, 4


@pytest.fixture
def compiled(monkeypatch):
    found = {}
    for module, name in (
        (mla, "_attend_latent"),
        (mla, "attend_latent_codes"),
        (split_parts, "_join_split"),
        (mla, "join_tiles"),
        (head_matmul, "_head_matmul"),
        (latent_write, "_latent_write"),
    ):
        found[name] = CompiledKernel(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    for module in (mla, head_matmul, latent_write, split_parts):
        monkeypatch.setattr(module, "overlaps", lambda x: True)
    monkeypatch.setattr(head_matmul, "use_triton", lambda x: True)
    return found


def new_pages(shape, kv_dtype, tokens=BLOCK):
    if kv_dtype in LARGEST_CODE:
        values = tokens * (shape.latent + 2 * shape.rope + 2)
        return torch.empty(61, values, dtype=torch.uint8).view(kv_dtype)
    return torch.empty(61, tokens * shape.width, dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, *LARGEST_CODE], ids=str)
@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize("as_tiles", [False, True])
def test_published_shapes(compiled, num_heads, as_tiles, kv_dtype):
    shape, dtype = LatentShape(num_heads, 128, 64, 128, 512), torch.bfloat16
    pieces = [torch.empty(count, FIELDS, dtype=torch.int64) for count in ((0, 8) if as_tiles else (8, 0))]
    numbers = (torch.empty(TOKENS, dtype=torch.int64), torch.empty(TOKENS, dtype=torch.int64))
    table, finished = torch.empty(2, 16, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    spans = PagedSpans(table, *numbers, *pieces, (), finished, 61, 1, SpanForm(guarded=True))
    q = torch.empty(TOKENS, num_heads, 192, dtype=dtype)
    pages = new_pages(shape, kv_dtype)
    weight = torch.empty(num_heads, 256, 512, dtype=dtype)
    mla.mla_attention_triton(q, q[:, 0], pages, spans, weight, shape, 0.1)
    angles = torch.empty(TOKENS, 64)
    norm = Norm(torch.empty(512, dtype=dtype), 1e-6)
    kv = torch.empty(TOKENS, shape.width, dtype=dtype)
    latent_write.latent_write_triton(q, kv, norm, angles, angles, numbers[1], pages, numbers[0])
    attends = "attend_latent_codes" if kv_dtype in LARGEST_CODE else "_attend_latent"
    for name, kernel in compiled.items():
        if kernel.found is None:
            continue
        assert kernel.found.metadata.shared <= SHARED_BYTES, f"{name} needs {kernel.found.metadata.shared} bytes"
    launched = {attends, "_head_matmul", "_latent_write", *(["join_tiles"] if as_tiles else [])}
    assert {name for name, kernel in compiled.items() if kernel.found is not None} == launched
    attend = compiled[attends].found
    assert "wgmma.mma_async" in attend.asm["ptx"]
    query = torch.empty(TOKENS, num_heads, shape.width, dtype=dtype)
    mla_split.split_attention_triton(query, new_pages(shape, kv_dtype, 16), spans, BlockSplit(3, 8), shape, 0.1)
    for name in (attends, "_join_split"):
        assert compiled[name].found.metadata.shared <= SHARED_BYTES
