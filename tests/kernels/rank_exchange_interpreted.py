"""Runs kernels/rank_sum.py and rank_gather.py in Triton's interpreter. Each rank is a process, and they wait for each other as
on GPUs."""

from __future__ import annotations

import multiprocessing
import random
import sys

import torch
import triton  # noqa: F401 - imported first, so that the kernels are real
from torch import Tensor

from stoker.kernels.rank_exchange import BLOCK, ExchangeRoom, buffer_bytes
from stoker.kernels.rank_gather import rank_gather_ref, rank_gather_triton
from stoker.kernels.rank_sum import rank_sum_ref, rank_sum_triton

PROGRAMS, SLOT_BYTES = 2, 2 * BLOCK * 4  # two pieces of float32, four of float16
ROUND = PROGRAMS * SLOT_BYTES // 4  # values of float32
SIZES = (1, 3, 100, BLOCK, BLOCK + 1, 2 * BLOCK + 77, ROUND, ROUND + 5, 3 * ROUND - 9)
SUMMED, GATHERED = (torch.float32, torch.float16), (torch.float16, torch.int64, torch.uint8, torch.float32)
LAST_EPOCH = 2**31 - 1  # the next one is negative


def tensors(number: int, num_ranks: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    parts = torch.randn(num_ranks, size, generator=generator).mul(50)
    return list(parts.abs().to(dtype) if dtype == torch.uint8 else parts.to(dtype))


def run_rank(rank: int, buffers: list[Tensor], flags: list[Tensor], first_epoch: int, num_calls: int) -> None:
    num_ranks, rng = len(buffers), random.Random(num_calls)
    addresses = [torch.tensor([one.data_ptr() for one in tensors]) for tensors in (buffers, flags)]
    epochs = torch.full((PROGRAMS,), first_epoch, dtype=torch.int32)
    room = ExchangeRoom(*addresses, epochs, rank, PROGRAMS, SLOT_BYTES)
    for number in range(num_calls):
        size = SIZES[number] if number < len(SIZES) else rng.choice(SIZES)
        dtype = rng.choice(SUMMED)
        parts = tensors(number, num_ranks, size, dtype)
        assert torch.equal(rank_sum_triton(parts[rank].clone(), room), rank_sum_ref(parts)), (number, size, dtype)
        dtype = rng.choice(GATHERED)
        parts = tensors(number, num_ranks, size, dtype)
        assert torch.equal(rank_gather_triton(parts[rank], room), rank_gather_ref(parts)), (number, size, dtype)
    assert torch.equal(flags[rank], epochs)
    assert int(epochs[0]) - first_epoch + (0 if epochs[0] > 0 else 1 << 32) >= 2 * num_calls


def check(num_ranks: int, first_epoch: int, num_calls: int) -> None:
    context = multiprocessing.get_context("fork")  # the ranks have the same addresses
    buffers = [torch.full((buffer_bytes(PROGRAMS, SLOT_BYTES),), 0xFF, dtype=torch.uint8) for _ in range(num_ranks)]
    flags = [torch.full((PROGRAMS,), first_epoch, dtype=torch.int32) for _ in range(num_ranks)]
    for one in (*buffers, *flags):
        one.share_memory_()
    ranks = [
        context.Process(target=run_rank, args=(rank, buffers, flags, first_epoch, num_calls), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
        if process.exitcode != 0:
            sys.exit(f"{num_ranks} ranks: exit code {process.exitcode}")


torch.set_num_threads(1)
check(2, 0, 10)
check(4, LAST_EPOCH - 5, 4)
print("ok")
