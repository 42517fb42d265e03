"""Pages of every dtype: what is written is read again, rounded as little as the dtype allows, and nothing else changes."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from stoker.kernels.kv_pages import LARGEST_CODE, kv_read, kv_write, page_tokens
from stoker.kernels.latent_pages import entries_read, entries_write, entry_tokens, entry_values

TOKENS, DIM, HEADS = 16, 24, 3
MOST_ERROR = {
    torch.int8: 0.5 / 127 + 0.004,
    torch.float8_e4m3fn: 2**-4 + 0.004,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}


def new_pages(count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype in LARGEST_CODE:
        return torch.zeros(count, TOKENS * (DIM + 2), dtype=torch.uint8).view(dtype)
    return torch.zeros(count, TOKENS * DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", list(MOST_ERROR))
def test_values_are_read_as_they_were_written(kv_dtype, dtype):
    torch.manual_seed(0)
    pages = new_pages(8, kv_dtype)
    assert page_tokens(pages, DIM) == TOKENS
    # Tokens of very different size, one of them all zeros.
    size = torch.tensor([1.0, 1e-4, 300.0, 0.0, 0.02])[:, None, None]
    src = (torch.randn(5, HEADS, DIM) * size).to(dtype)
    index = torch.randperm(8 * TOKENS)[: 5 * HEADS]
    written = kv_write(src, pages, index)
    found = kv_read(pages, torch.arange(8), DIM, dtype).view(-1, DIM)
    assert torch.equal(found[index], written.view(-1, DIM))
    others = torch.ones(8 * TOKENS, dtype=torch.bool)
    others[index] = False
    assert not found[others].any()
    largest = src.double().abs().amax(-1, keepdim=True)
    tiny = 2**-24 if torch.float16 in (dtype, kv_dtype) else 0.0  # float16's smallest step
    assert ((written.double() - src.double()).abs() <= largest * (MOST_ERROR[kv_dtype] + 2**-8) + tiny).all()


def test_values_beyond_float16_stay_finite():
    pages = new_pages(1, torch.float16)
    src = torch.tensor([1e9, -1e9]).repeat(DIM // 2).view(1, 1, DIM)
    assert kv_write(src, pages, torch.tensor([3])).abs().max() == 65504


def test_a_few_large_channels_stay_nearly_exact_in_float8():
    """They decide the scores in many models."""
    torch.manual_seed(0)
    src = torch.randn(64, 1, DIM)
    src[:, :, 5] *= 30
    written = kv_write(src, new_pages(4, torch.float8_e4m3fn), torch.arange(64))
    largest = src.abs().argmax(-1) == 5
    error = ((written - src).abs() / src.abs())[:, :, 5][largest]
    assert len(error) > 40
    assert error.max() < 2**-8 + 1e-6


@pytest.mark.parametrize("kv_dtype", list(LARGEST_CODE))
def test_a_large_rotated_key_takes_no_codes_from_the_latent(kv_dtype):
    torch.manual_seed(0)
    latent, rope = DIM, 6
    pages = torch.zeros(4, entry_values(torch.empty(0, dtype=kv_dtype), latent, rope) * TOKENS, dtype=torch.uint8)
    pages = pages.view(kv_dtype)
    assert entry_tokens(pages, latent, rope) == TOKENS
    entries = torch.randn(20, latent + rope)
    entries[:, latent:] *= 1000
    index = torch.randperm(4 * TOKENS)[:20]
    index[0] = -1  # on another rank
    written = entries_write(entries, pages, index, latent)
    found = entries_read(pages, torch.arange(4), latent, rope, torch.float32).view(-1, latent + rope)
    assert torch.equal(found[index[1:]], written[1:])
    found[index[1:]] = 0
    assert not found.any()
    error, largest = (written - entries).abs(), entries[:, :latent].abs().amax(1, keepdim=True)
    assert (error[:, :latent] <= largest * (MOST_ERROR[kv_dtype] + 2**-8)).all()
    assert (error[:, latent:] <= entries[:, latent:].abs() * 2**-8).all()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_compile_for_a_gpu():
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", str(Path(__file__).with_name("kv_compiled.py"))]
    # The second variable is Triton's default; if it is unset, Triton 3.9 warns that the default will change.
    said = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(command, env={**os.environ, **said}, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
