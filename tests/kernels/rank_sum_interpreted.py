"""Runs kernels/rank_sum.py in Triton's interpreter: the last rank of several, whose peers have raised their flags."""

from __future__ import annotations

import torch
import triton  # noqa: F401 - imported first, so that the kernels are real

from stoker.kernels.rank_sum import BLOCK, rank_sum_ref, rank_sum_triton


def check(num_ranks: int, num_values: int, dtype: torch.dtype) -> None:
    room = -(-num_values // BLOCK) * BLOCK
    generator = torch.Generator().manual_seed(num_values)
    buffers = [torch.full((2 * room,), float("nan"), dtype=dtype) for _ in range(num_ranks)]
    flags = [torch.zeros(room // BLOCK, dtype=torch.int32) for _ in range(num_ranks)]
    epochs = torch.zeros(room // BLOCK, dtype=torch.int32)
    addresses = [torch.tensor([one.data_ptr() for one in tensors]) for tensors in (buffers, flags)]
    for epoch in (1, 2, 3, 4):
        parts = [torch.randn(num_values, generator=generator).to(dtype) for _ in range(num_ranks)]
        rank = epoch % num_ranks
        for other in range(num_ranks):
            if other != rank:
                half = epoch % 2 * room
                buffers[other][half : half + num_values] = parts[other]
                flags[other].fill_(epoch)
        found = rank_sum_triton(parts[rank].clone(), *addresses, epochs, room, rank)
        assert torch.equal(found, rank_sum_ref(parts)), (num_ranks, num_values, dtype, epoch)
        assert flags[rank].tolist() == epochs.tolist() == [epoch] * len(epochs)


for case in (
    (2, 3, torch.float32),
    (3, BLOCK, torch.float16),
    (4, 2 * BLOCK + 77, torch.float32),
    (8, 100, torch.float16),
):
    check(*case)
print("ok")
