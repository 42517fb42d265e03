"""The sum over ranks compiles for a Hopper GPU, with flags that all GPUs of a machine see. test_rank_sum.py starts this."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels.hopper import CompiledKernel

from stoker.kernels import rank_sum

assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is not to be set"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rank_sum(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    kernel = CompiledKernel(rank_sum._rank_sum)
    monkeypatch.setattr(rank_sum, "_rank_sum", kernel)
    addresses, epochs = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    rank_sum.rank_sum_triton(torch.empty(4096, dtype=dtype), addresses, addresses, epochs, 8192, 1)
    code = kernel.found.asm["ptx"]
    assert code.count(".sys.release") == 1
    assert code.count(".sys.acquire") == len(addresses)
