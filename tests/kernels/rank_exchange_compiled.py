"""The kernels that exchange tensors between ranks compile for a Hopper GPU, with flags that all GPUs of a machine see.
test_rank_exchange.py starts this."""

from __future__ import annotations

import re

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels.hopper import CompiledKernel

from stoker.kernels import rank_gather, rank_sum
from stoker.kernels.rank_exchange import ExchangeRoom

assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is not to be set"

RANKS = 4
ADDRESSES, EPOCHS = torch.zeros(RANKS, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
ROOM = ExchangeRoom(ADDRESSES, ADDRESSES, EPOCHS, 1, 32)


def check_order(code: str) -> None:
    """One flag is raised, those of the other ranks are waited for, and what they published is read after that."""
    assert code.count(".sys.release") == 1
    assert code.count(".sys.acquire") == RANKS - 1
    raised, waited = code.index(".sys.release"), code.rindex(".sys.acquire")
    read = [found.start() for found in re.finditer(r"ld\.volatile\.global", code)]
    assert len(read) >= RANKS
    assert raised < code.index(".sys.acquire") < waited < min(read)
    assert "bar" in code[waited : min(read)]
    barrier = max(found.start() for found in re.finditer(r"bar(rier)?\.", code[:raised]))
    assert not re.search(r"st\.global", code[barrier:raised]), "a store after the barrier, before the flag"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rank_sum(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    kernel = CompiledKernel(rank_sum._rank_sum)
    monkeypatch.setattr(rank_sum, "_rank_sum", kernel)
    rank_sum.rank_sum_triton(torch.empty(4096, dtype=dtype), ROOM)
    check_order(kernel.found.asm["ptx"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
def test_rank_gather(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    kernel = CompiledKernel(rank_gather._rank_gather)
    monkeypatch.setattr(rank_gather, "_rank_gather", kernel)
    rank_gather.rank_gather_triton(torch.empty(3, 1024, dtype=dtype), ROOM)
    check_order(kernel.found.asm["ptx"])
