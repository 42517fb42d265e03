"""One rank of test_one_gpu_ranks_cuda.py: sums and gathers through CUDA IPC with other ranks on the same GPU.

python one_gpu_exchange.py PORT RANK RANKS REPLAYS
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from stoker.kernels.rank_sum import SUMMED_DTYPES, rank_sum_ref
from stoker.parallel.gloo import GlooWorld
from stoker.parallel.ipc import IpcCollectives
from stoker.parallel.through_host import HostCollectives

DEVICE = torch.device("cuda", 0)
SIZES = (1, 3, 2048, 2049, 4096, 8 * 4096 + 6, 64 * 4096, 8 * 32064, 2_500_001)  # the last one takes several rounds
GATHERED = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
TIMED = (("sum", 4096), ("sum", 64 * 4096), ("gather", 32064), ("gather", 64 * 32064))  # values of bfloat16
CALLS = 32  # of a timed graph


def main(port: int, rank: int, num_ranks: int, num_replays: int) -> None:
    torch.cuda.set_device(DEVICE)
    world = GlooWorld("127.0.0.1", port, rank, num_ranks, 30.0, _listener(port) if rank == 0 else None)
    group = world.group("all", tuple(range(num_ranks)))
    ipc = IpcCollectives(HostCollectives(group), group, DEVICE, num_ranks)
    say = print if rank == 0 else _say_nothing
    check_eager(ipc)
    say(f"  {num_ranks} ranks, eager: equal", flush=True)
    check_captured(ipc, num_replays)
    say(f"  {num_ranks} ranks, {num_replays} replays of a graph: equal", flush=True)
    for name, size in TIMED:
        say(f"  {num_ranks} ranks, {name} of {size} bfloat16: {time_captured(ipc, name, size):.1f} us", flush=True)
    torch.cuda.synchronize()
    group.gather(torch.zeros(1))  # no rank ends while another one reads its memory
    ipc.close()


def _listener(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def _say_nothing(*_args: object, **_named: object) -> None:
    pass


def parts(number: int, num_ranks: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors of all ranks. Every rank computes the same ones, on the host."""
    generator = torch.Generator().manual_seed(number)
    found = torch.randn(num_ranks, size, generator=generator).mul(30)
    return list(found.abs().to(dtype) if dtype == torch.uint8 else found.to(dtype))


def check_eager(ipc: IpcCollectives) -> None:
    rng = random.Random(0)
    for number in range(60):
        size = SIZES[number % len(SIZES)]
        given = parts(number, ipc.num_ranks, size, dtype := rng.choice(SUMMED_DTYPES))
        found = ipc.sum(given[ipc.rank].to(DEVICE)).cpu()
        assert torch.equal(found, rank_sum_ref(given)), ("sum", number, size, dtype)
        given = parts(number, ipc.num_ranks, size, dtype := rng.choice(GATHERED))
        gathered = ipc.gather(given[ipc.rank].to(DEVICE))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(gathered, given, strict=True)), ("gather", number, dtype)


def captured(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    function()  # compiles the kernels
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        function()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def check_captured(ipc: IpcCollectives, num_replays: int) -> None:
    """The outputs of every replay are kept on the device, so that replays follow each other without a pause."""
    cases = [(size, dtype) for size in SIZES[:-1] for dtype in (torch.bfloat16, torch.float32)]
    inputs = [torch.zeros(size, dtype=dtype, device=DEVICE) for size, dtype in cases]
    sums = [torch.zeros_like(x) for x in inputs]
    gathered = [x.new_zeros(ipc.num_ranks, len(x)) for x in inputs]

    def run() -> None:
        for x, total, all_parts in zip(inputs, sums, gathered, strict=True):
            total.copy_(ipc.sum(x.clone()))
            for into, part in zip(all_parts, ipc.gather(x), strict=True):
                into.copy_(part)

    graph = captured(run)
    given = [[parts(31 * i + j, ipc.num_ranks, size, dtype) for i, (size, dtype) in enumerate(cases)] for j in range(3)]
    own = [[one[ipc.rank].to(DEVICE) for one in of_replay] for of_replay in given]
    expected = [[torch.stack([rank_sum_ref(one), *one]).to(DEVICE) for one in of_replay] for of_replay in given]
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for replay in range(num_replays):
        for x, value in zip(inputs, own[replay % 3], strict=True):
            x.copy_(value)
        graph.replay()
        for total, all_parts, right in zip(sums, gathered, expected[replay % 3], strict=True):
            wrong += (total != right[0]).sum() + (all_parts != right[1:]).sum()
    assert int(wrong) == 0, f"{int(wrong)} wrong values"


def time_captured(ipc: IpcCollectives, name: str, size: int) -> float:
    """Return the microseconds of one call in a graph of many."""
    x = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
    call = ipc.sum if name == "sum" else ipc.gather

    def run() -> None:
        for _ in range(CALLS):
            call(x)

    graph = captured(run)
    graph.replay()
    torch.cuda.synchronize()
    started_s, count = time.monotonic(), 0
    while count < 3:
        graph.replay()
        count += 1
    torch.cuda.synchronize()
    return (time.monotonic() - started_s) / (count * CALLS) * 1e6


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    sys.stdout.flush()
    os._exit(0)  # the memory that the ranks share is released in any order
