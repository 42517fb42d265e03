"""Runs the Triton kernels of latent attention on a CPU. test_mla_kernels.py starts this in a process of its own, like
interpreted.py."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels import mla_cases
from kernels.mla_cases import SHAPES

from stoker.kernels.kv_pages import LARGEST_CODE

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spans_of_all_kinds(shape):
    mla_cases.spans_of_all_kinds(shape, CPU, torch.float32)


def test_blocks_that_are_read_in_parts():
    mla_cases.spans_of_all_kinds(SHAPES[0], CPU, torch.float32, block=64)


@pytest.mark.parametrize(("shape", "contexts"), [(SHAPES[0], 4), (SHAPES[1], 2)], ids=str)
def test_a_context_that_ranks_split(shape, contexts):
    mla_cases.split_spans(shape, contexts, CPU, torch.float32)


def test_exact_spans():
    mla_cases.exact_spans(SHAPES[0], CPU, torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 40])
def test_matmuls_of_heads(num_tokens):
    mla_cases.matmul(num_tokens, CPU, torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, *LARGEST_CODE], ids=str)
def test_writing(shape, kv_dtype):
    mla_cases.write(7, shape, CPU, torch.float32, kv_dtype)


@pytest.mark.parametrize(("kv_dtype", "block"), [(torch.float8_e4m3fn, 16), (torch.int8, 64)], ids=str)
def test_spans_over_8_bit_entries(kv_dtype, block):
    mla_cases.spans_over_codes(SHAPES[0], CPU, torch.float32, block, kv_dtype)


def test_a_context_of_8_bit_entries_that_ranks_split():
    mla_cases.split_codes(SHAPES[0], 2, CPU, torch.float32, torch.float8_e4m3fn)


def test_exact_spans_over_8_bit_entries():
    mla_cases.exact_codes(SHAPES[0], CPU, torch.float32, torch.float8_e4m3fn)
