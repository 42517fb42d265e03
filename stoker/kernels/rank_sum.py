# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The sum of the ranks' tensors in one kernel, for ranks whose GPUs read each other's memory (CUDA IPC).

x [values]   buffers [ranks] int64: the address of each rank's buffer of 2 * room values
flags [ranks] int64: the address of each rank's flags, int32 [programs]   epochs [programs] int32: how often each ran here
-> x, the sum of all ranks' x in the order of the ranks

Each program publishes its part of x in this rank's buffer, raises its flag, waits for the same flag of the other ranks, and
adds up their parts. The two halves of a buffer are used in turns: a rank overwrites a half two sums later, and to get there
all ranks must have raised the flag of the sum in between, which comes after their reads. Epochs are counted on the device, so
that a captured kernel can be replayed. A flag only grows: a rank that is late finds the flags of the others already raised.

Not yet run on GPUs. The tests run it in Triton's interpreter, one rank after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, tl, triton

BLOCK = 2048  # values of a program


def rank_sum_ref(parts: list[Tensor]) -> Tensor:
    """Add in float32, in the order of the ranks, and round once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@triton.jit
def _rank_sum(
    x, buffers, flags, epochs, num_values, room, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_values
    epoch = tl.load(epochs + program) + 1
    half = (epoch % 2).to(tl.int64) * room
    own = tl.load(buffers + RANK).to(tl.pointer_type(TYPE))
    tl.store(own + half + at, tl.load(x + at, mask=inside), mask=inside)
    tl.debug_barrier()  # all threads have written before one of them raises the flag
    own_flag = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + program
    tl.atomic_xchg(own_flag, epoch, sem="release", scope="sys")
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:
            pass
        part = tl.load(buffers + rank).to(tl.pointer_type(TYPE))
        # The other rank's GPU writes it: it must not come from a cache that was filled before.
        total += tl.load(part + half + at, mask=inside, other=0.0, volatile=True).to(tl.float32)
    tl.store(x + at, total.to(TYPE), mask=inside)
    tl.store(epochs + program, epoch)


def rank_sum_triton(x: Tensor, buffers: Tensor, flags: Tensor, epochs: Tensor, room: int, rank: int) -> Tensor:
    """Add up x over the ranks, in place."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    num_values = x.numel()
    assert num_values <= room
    assert x.is_contiguous()
    _rank_sum[(cdiv(num_values, BLOCK),)](
        x, buffers, flags, epochs, num_values, room, RANK=rank, NUM_RANKS=len(buffers), TYPE=types[x.dtype], BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return x
