# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The ranks' tensors in one, for ranks whose GPUs read each other's memory (CUDA IPC).

x [...] of any dtype -> out [ranks, ...]. rank_exchange.py describes the exchange.

Not yet run on GPUs. The tests run it in Triton's interpreter, each rank in a process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import tl, triton
from stoker.kernels.rank_exchange import BLOCK, NUM_WARPS, ExchangeRoom, meet, slot_of


def rank_gather_ref(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts)


@triton.jit
def _rank_gather(
    x, out, buffers, flags, epochs, num_values, slot, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TYPE: tl.constexpr,
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
            for rank in tl.static_range(NUM_RANKS):
                part = slot_of(buffers, rank, epoch, slot, TYPE) + piece * BLOCK + lanes
                # Another rank writes it: it must not come from a cache that was filled before.
                found = tl.load(part, mask=inside, volatile=True)
                row = tl.full([], rank, tl.int64) * num_values
                tl.store(out + row + at, found, mask=inside)
    tl.store(epochs + program, epoch)


def rank_gather_triton(x: Tensor, room: ExchangeRoom) -> Tensor:
    """Return the tensors of all ranks. All have the same shape and dtype."""
    x = x.contiguous()
    out = x.new_empty(room.num_ranks, *x.shape)
    if x.numel():
        words = _as_words(x)
        types = {torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}
        _rank_gather[room.grid(words.numel())](
            words, out.view(-1).view(words.dtype), room.buffers, room.flags, room.epochs, words.numel(),
            room.slot_values(words.dtype), RANK=room.rank, NUM_RANKS=room.num_ranks, TYPE=types[words.dtype], BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


def _as_words(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as the largest integers of up to 4 bytes that they can be read as."""
    offset = x.storage_offset() * x.element_size()
    for dtype in (torch.int32, torch.int16):
        if x.nbytes % dtype.itemsize == 0 and offset % dtype.itemsize == 0:
            return x.view(-1).view(dtype)
    return x.view(-1).view(torch.uint8)
