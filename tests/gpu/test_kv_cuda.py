"""Blocks of pools on a GPU: checksums, CUDA IPC, and TCP and shared memory through pinned buffers. The peer is another
process on the same GPU. Runs under pytest (-m gpu), or as a script without pytest."""

from __future__ import annotations

import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch

if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

from kv.peer_world import LAYOUT, Puller, RemoteServer, ServerSetup, block_ids, closing, contents, keys, rank, raw

from stoker.base.config import HandoffSettings
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import PeerUnavailable
from stoker.kv.device.checksum import checksum, tensor_checksums

NUM_BLOCKS = 32
LARGE = KvLayout.of(num_layers=16, num_heads=8, width=64, block_tokens=64, dtype="bfloat16", dtype_bytes=2)  # 2 MiB
# Transport, location of the peer's pool, location of ours.
WAYS = [
    ("cuda_ipc", "cuda", "cuda"),
    ("tcp", "cuda", "cuda"),
    ("tcp", "cuda", "cpu"),
    ("tcp", "cpu", "cuda"),
    ("local", "cpu", "cuda"),
]


def test_a_gpu_gives_the_checksum_of_the_host() -> None:
    rng = np.random.default_rng(1)
    for num_bytes in (8, 24, 8192, 8200, 3 * 8192 + 40, 1 << 20, (8 << 20) + 8):
        blocks = rng.integers(0, 256, (5, num_bytes), dtype=np.uint8)
        on_gpu = torch.from_numpy(blocks).to("cuda")
        assert tensor_checksums(on_gpu) == [checksum(block) for block in blocks], num_bytes


def test_every_transport_brings_the_bytes() -> None:
    for transport, theirs, ours in WAYS:
        settings = HandoffSettings(transports=(transport,), secret="s")
        server = RemoteServer(ServerSetup(LARGE, NUM_BLOCKS, settings, device=theirs))
        with closing(server, puller := Puller(LARGE, NUM_BLOCKS, settings, device=ours)):
            before = puller.kv.blocks.clone()
            picked = [9, 2, 30, 4, 31, 0, 7, 8, 11]
            server.lease("L", keys(9), block_ids(*picked), 9, True)
            into = [5, 0, 17, 31, 1, 2, 3, 4]
            assert puller.pull(server.ticket, keys(8, first=1), block_ids(*into), first=1) == [True] * 8, transport
            expected = before.cpu()
            expected[into] = contents(LARGE, NUM_BLOCKS)[picked[1:]]
            assert raw(puller.kv.blocks) == raw(expected), (transport, theirs, ours)
            assert server("leases", "close", "L")


def test_ranks_of_another_size_take_their_heads() -> None:
    for (transport, theirs, our_device), (src_tp, dst_tp) in product(WAYS, [(1, 2), (2, 1), (2, 4)]):
        settings = HandoffSettings(transports=(transport,))
        setups = [
            ServerSetup(rank(LAYOUT, number, src_tp), NUM_BLOCKS, settings, engine_id="one", device=theirs)
            for number in range(src_tp)
        ]
        servers = [RemoteServer(setup) for setup in setups]
        with closing(*servers):
            for server in servers:
                server.lease("L", keys(5), block_ids(3, 1, 4, 15, 9), 5, True)
            servers[0]("world", "join", [server.ticket.address for server in servers[1:]])
            ours = rank(LAYOUT, dst_tp - 1, dst_tp)
            with closing(puller := Puller(ours, NUM_BLOCKS, settings, device=our_device)):
                found = puller.pull(servers[0].ticket, keys(5), block_ids(*range(5)))
                assert found == [True] * 5, (transport, src_tp, dst_tp)
                assert raw(puller.kv.blocks[:5]) == raw(contents(ours, NUM_BLOCKS)[[3, 1, 4, 15, 9]])


def test_bytes_that_change_while_they_are_read_and_a_peer_that_is_killed() -> None:
    settings = HandoffSettings(transports=("cuda_ipc",))
    server = RemoteServer(ServerSetup(LARGE, NUM_BLOCKS, settings, device="cuda"))
    with closing(server, puller := Puller(LARGE, NUM_BLOCKS, settings, device="cuda")):
        server.lease("L", keys(4), block_ids(1, 2, 3, 4), 4, True)
        assert puller.pull(server.ticket, keys(4), block_ids(0, 1, 2, 3)) == [True] * 4
        server("world", "spoil", 3)
        assert puller.pull(server.ticket, keys(4), block_ids(0, 1, 2, 3)) == [True, True, False, True]
        assert puller.client.stats().corrupt == 1
        server.kill()
        try:
            filled = puller.pull(server.ticket, keys(4), block_ids(0, 1, 2, 3), within_s=5)
        except PeerUnavailable:
            filled = [False] * 4
        assert filled == [False] * 4


def test_a_write_waits_for_what_still_uses_the_blocks() -> None:
    """The hook gets the stream that will write; work launched before must be done with the old bytes."""
    settings = HandoffSettings(transports=("tcp",))
    server = RemoteServer(ServerSetup(LARGE, NUM_BLOCKS, settings, device="cuda"))
    with closing(server, puller := Puller(LARGE, NUM_BLOCKS, settings, device="cuda")):
        used = torch.cuda.Event()
        puller.client._before_write = lambda stream: stream.wait_event(used)
        server.lease("L", keys(4), block_ids(1, 2, 3, 4), 4, True)
        torch.cuda._sleep(200_000_000)
        seen = puller.kv.blocks[:4].clone()
        used.record()
        assert puller.pull(server.ticket, keys(4), block_ids(0, 1, 2, 3)) == [True] * 4
        assert not seen.any(), "the old bytes were zero"
        assert raw(puller.kv.blocks[:4]) == raw(contents(LARGE, NUM_BLOCKS)[1:5])


def print_speeds() -> None:
    count = 512
    for transport, theirs, ours in WAYS:
        settings = HandoffSettings(transports=(transport,))
        server = RemoteServer(ServerSetup(LARGE, count, settings, device=theirs))
        with closing(server, puller := Puller(LARGE, count, settings, device=ours)):
            server.lease("L", keys(count), block_ids(*range(count)), count, True)
            times = []
            for _ in range(4):
                started = time.perf_counter()
                assert all(puller.pull(server.ticket, keys(count), block_ids(*range(count)), within_s=60))
                times.append(time.perf_counter() - started)
            speed = count * LARGE.block_bytes / min(times) / 1e9
            print(f"{transport}, {theirs} -> {ours}: {speed:.2f} GB/s ({count} blocks of 2 MiB, best of 4)")


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: ok", flush=True)
    print_speeds()
