# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The sum of the ranks' tensors in one kernel, for ranks whose GPUs read each other's memory (CUDA IPC).

x [values] -> x, the sum of all ranks' x in the order of the ranks. rank_exchange.py describes the exchange.

Not yet run on GPUs. The tests run it in Triton's interpreter, each rank in a process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import tl, triton
from stoker.kernels.rank_exchange import BLOCK, NUM_WARPS, ExchangeRoom, meet, slot_of

SUMMED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rank_sum_ref(parts: list[Tensor]) -> Tensor:
    """Add in float32, in the order of the ranks, and round once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@triton.jit
def _rank_sum(
    x, buffers, flags, epochs, num_values, slot, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    stride = tl.num_programs(0) * BLOCK  # between two pieces of a program
    epoch = tl.load(epochs + program)
    for first in range(program * BLOCK, num_values, slot // BLOCK * stride):
        epoch += 1
        pieces = tl.minimum((num_values - first + stride - 1) // stride, slot // BLOCK)
        own = slot_of(buffers, RANK, epoch, slot, TYPE)
        for piece in range(pieces):
            at = tl.multiple_of(first + piece * stride, BLOCK).to(tl.int64) + lanes
            inside = at < num_values
            tl.store(own + piece * BLOCK + lanes, tl.load(x + at, mask=inside), mask=inside)
        meet(flags, epoch, RANK, NUM_RANKS)
        for piece in range(pieces):
            at = tl.multiple_of(first + piece * stride, BLOCK).to(tl.int64) + lanes
            inside = at < num_values
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(NUM_RANKS):
                part = slot_of(buffers, rank, epoch, slot, TYPE) + piece * BLOCK + lanes
                # Another rank writes it: it must not come from a cache that was filled before.
                total += tl.load(part, mask=inside, other=0.0, volatile=True).to(tl.float32)
            tl.store(x + at, total.to(TYPE), mask=inside)
    tl.store(epochs + program, epoch)


def rank_sum_triton(x: Tensor, room: ExchangeRoom) -> Tensor:
    """Add up x over the ranks, in place. All ranks have the same number of values."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    num_values = x.numel()
    assert x.is_contiguous()
    if num_values:
        _rank_sum[room.grid(num_values)](
            x, room.buffers, room.flags, room.epochs, num_values, room.slot_values(x.dtype), RANK=room.rank,
            NUM_RANKS=room.num_ranks, TYPE=types[x.dtype], BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return x
