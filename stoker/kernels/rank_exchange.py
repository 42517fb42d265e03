# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What kernels need that exchange tensors between ranks, whose GPUs read each other's memory (CUDA IPC).

Every program of such a kernel has a slot in the buffer of each rank, with two halves of `slot_bytes`, and a flag on each
rank. It works in rounds. A round has a number, the epoch, and uses the half `epoch & 1`:

    publish a part of x in this rank's slot -> raise this rank's flag to the epoch -> wait for the flags of the same program on
    the other ranks -> read their slots

A program overwrites a half two rounds later. By then the other ranks have raised their flags of the round in between, after
they read the half. The bytes of a slot belong to one program for any dtype, so that calls with several dtypes and sizes may
follow each other. Epochs are counted on the device, so that a captured kernel can be replayed. They wrap around after 2**31
rounds (some hours of decoding); flags are therefore compared by their difference.

A program waits only for the program of the same number. Ranks with a GPU of their own always get there, because programs start
in order. Ranks that share a GPU could fill it with waiting programs while the kernels of a late rank find no room. So the
number of programs is bounded (`max_programs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, tl, triton

BLOCK = 2048  # values that a program publishes or reads at a time
NUM_WARPS = 8
SLOT_BYTES = 32 << 10
_ALONE_PROGRAMS = 128
# Of all ranks of one GPU. Even if each runs on a multiprocessor of its own, some of the 108 or more of a data center GPU have
# none, so that kernels that fill a multiprocessor go on.
_SHARED_PROGRAMS = 64


@dataclass(frozen=True, slots=True)
class ExchangeRoom:
    """The buffers and flags of all ranks, as one rank sees them."""

    buffers: Tensor  # [ranks] int64: the address of each rank's buffer
    flags: Tensor  # [ranks] int64: the address of each rank's flags, int32 [max_programs]
    epochs: Tensor  # [max_programs] int32: the last round of each program of this rank
    rank: int
    max_programs: int
    slot_bytes: int = SLOT_BYTES

    @property
    def num_ranks(self) -> int:
        return len(self.buffers)

    def grid(self, num_values: int) -> tuple[int]:
        return (min(self.max_programs, cdiv(num_values, BLOCK)),)

    def slot_values(self, dtype: torch.dtype) -> int:
        return self.slot_bytes // dtype.itemsize


def max_programs(ranks_per_gpu: int) -> int:
    """Return how many programs may wait at a time on each rank."""
    return _ALONE_PROGRAMS if ranks_per_gpu == 1 else max(1, _SHARED_PROGRAMS // ranks_per_gpu)


def buffer_bytes(num_programs: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the size of a rank's buffer."""
    return 2 * num_programs * slot_bytes


@triton.jit
def slot_of(buffers, rank, epoch, slot, TYPE: tl.constexpr):
    """Return this program's half of a rank's slot. `slot` is its size in values."""
    half = (2 * tl.program_id(0) + (epoch & 1)).to(tl.int64) * slot
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(TYPE)) + half, 16)


@triton.jit
def meet(flags, epoch, RANK: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Raise this rank's flag, and wait until all ranks have published. Loads after it see what they have written."""
    program = tl.program_id(0)
    tl.debug_barrier()  # all threads have written before one of them raises the flag
    own = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + program
    tl.atomic_xchg(own, epoch, sem="release", scope="sys")
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0:
                pass
    tl.debug_barrier()  # the thread that waited has seen the flags: the others read after it
