"""How fast blocks go from one worker's pool to another's, by each transport, beside the raw media in the same run.

    python bench/kv_bandwidth.py [--out FILE.json] [--rounds 9] [--transports local,tcp,mooncake]

Two processes on one machine. Every figure is the median of rounds that take turns, so that a slow minute hits all alike: memcpy
between two shared mappings, a plain socket that fills the same blocks, Mooncake's bare API, and our pulls. "no sum" is the same
pull with a checksum that costs nothing, on both sides: what lies between it and the pull is the checksum's share.
The tiers have their own: bench/kv_tiers.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.base.config import HandoffSettings
from stoker.base.ids import BlockId, BlockKey
from stoker.kv import checksum
from stoker.kv.device import DeviceKv
from stoker.kv.layout import KvLayout
from stoker.kv.leases import LeaseBook
from stoker.kv.peer_client import PeerClient
from stoker.kv.peer_server import PeerServer
from stoker.kv.transfer import KvIdentity, KvTicket, PeerUnavailable
from stoker.kv.transports import tcp
from stoker.kv.transports.contract import TRANSPORTS

SIZES_MIB = (0.5, 2.0, 8.0)
POOL_BYTES = 128 << 20  # well above the caches
CPU = torch.device("cpu")
# What each transport is measured against, and the share of it that it must reach.
TARGETS = {"local": ("memcpy", 0.8), "tcp": ("socket", 0.8), "mooncake": ("mooncake bare", 0.9)}
REAL_SUM = checksum.RunningChecksum


class NoSum:
    """In the place of RunningChecksum: bytes move, nothing is summed up."""

    def __init__(self, num_bytes: int) -> None:
        pass

    def add(self, data: Any) -> None:
        pass

    def value(self) -> int:
        return 0


def set_sums(real: bool) -> None:
    checksum.RunningChecksum = REAL_SUM if real else NoSum  # type: ignore[misc,assignment]
    tcp.RunningChecksum = checksum.RunningChecksum  # type: ignore[attr-defined]


class Pool:
    def __init__(self, size_mib: float) -> None:
        # 8 layers of one head of 64 tokens, float32; the head's width makes up the size.
        self.layout = KvLayout(8, 1, int(size_mib * (1 << 20)) // (8 * 2 * 64 * 4), 64, "float32", 4)
        self.count = POOL_BYTES // self.layout.block_bytes
        self.kv = DeviceKv(self.layout, self.count, CPU)
        self.kv.blocks.normal_()  # every page is there
        blocks = self.kv.host_blocks()
        assert blocks is not None
        self.bytes: NDArray[np.uint8] = blocks
        self.identity = KvIdentity("bench", "bench", self.layout.identity, self.layout.dtype)
        self.ids = [BlockId(number) for number in range(self.count)]
        self.keys = [BlockKey(number.to_bytes(16, "little")) for number in range(self.count)]


@dataclass(frozen=True)
class Peer:
    ticket: KvTicket
    socket_port: int
    mooncake: tuple[str, int] | None  # segment, base address


def bare_mooncake(pool: Pool) -> Any:
    from mooncake.engine import TransferEngine

    engine, base = TransferEngine(), pool.kv.blocks.data_ptr()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(base, pool.bytes.nbytes):
        raise PeerUnavailable("mooncake does not start")
    return engine


def serve(pipe: Connection, size_mib: float, transports: tuple[str, ...]) -> None:
    """The other process: its pool behind a PeerServer, a plain socket and Mooncake's engine alone."""
    torch.set_num_threads(1)
    pool, leases = Pool(size_mib), LeaseBook()
    leases.open("L", pool.keys, pool.ids, pool.count, True)
    server = PeerServer(pool.kv, pool.identity, leases, HandoffSettings(transports=transports), lambda _: None)
    listener = socket.create_server(("127.0.0.1", 0))
    engine = bare_mooncake(pool) if "mooncake" in transports else None
    bare = (f"127.0.0.1:{engine.get_rpc_port()}", pool.kv.blocks.data_ptr()) if engine else None
    ticket = KvTicket(server.engine_id, server.address, "L", 1, 600.0)
    pipe.send(Peer(ticket, listener.getsockname()[1], bare))
    plain, _ = listener.accept()
    while (command := pipe.recv()) != "end":
        if command == "send":
            for block in pool.bytes:
                plain.sendall(block.data)
        else:
            set_sums(command == "sum")
            pipe.send(command)
    server.close()


def memcpy(src: Pool, dst: Pool) -> None:
    for mine, theirs in zip(dst.bytes, src.bytes, strict=True):
        np.copyto(mine, theirs)


def plain_socket(pipe: Connection, plain: socket.socket, dst: Pool) -> None:
    pipe.send("send")
    for block in dst.bytes:
        at, view = 0, block.data
        while at < len(view):
            at += plain.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)


def bare_read(engine: Any, segment: str, base: int, dst: Pool) -> None:
    size = dst.layout.block_bytes
    ours = [dst.kv.blocks.data_ptr() + number * size for number in dst.ids]
    if engine.batch_transfer_sync_read(segment, ours, [base + number * size for number in dst.ids], [size] * dst.count):
        raise PeerUnavailable("mooncake's bare read failed")


def pull(client: PeerClient, ticket: KvTicket, dst: Pool) -> None:
    filled = client.pull(ticket, 0, dst.keys, dst.ids, time.monotonic() + 60)
    if not all(filled):
        raise PeerUnavailable(f"{filled.count(False)} of {dst.count} blocks did not come")


def measure(size_mib: float, transports: tuple[str, ...], num_rounds: int) -> dict[str, float]:
    """GB/s by name."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, size_mib, transports), daemon=True)
    process.start()
    peer: Peer = pipe.recv()
    src, dst = Pool(size_mib), Pool(size_mib)
    plain = socket.create_connection(("127.0.0.1", peer.socket_port))
    raw: dict[str, Callable[[], None]] = {
        "memcpy": partial(memcpy, src, dst),
        "socket": partial(plain_socket, pipe, plain, dst),
    }
    if peer.mooncake is not None:
        raw["mooncake bare"] = partial(bare_read, bare_mooncake(dst), *peer.mooncake, dst)
    clients = {name: PeerClient(dst.kv, dst.identity, HandoffSettings(transports=(name,))) for name in transports}
    pulls = {name: partial(pull, client, peer.ticket, dst) for name, client in clients.items()}
    times: dict[str, list[float]] = {}

    def timed(name: str, way: Callable[[], None]) -> None:
        started = time.perf_counter()
        way()
        times.setdefault(name, []).append(time.perf_counter() - started)

    for number in range(num_rounds + 1):
        for name, way in raw.items():
            timed(name, way)
        for command, suffix in (("no sum", ", no sum"), ("sum", "")):
            pipe.send(command)
            pipe.recv()
            set_sums(command == "sum")
            for name, way in pulls.items():
                timed(name + suffix, way)
        if number == 0:
            times.clear()  # pages, connections and links are there from now on
    for client in clients.values():
        client.close()
    pipe.send("end")
    process.join(20)
    plain.close()
    return {name: POOL_BYTES / statistics.median(taken) / 1e9 for name, taken in times.items()}


def checksum_speed(num_rounds: int) -> float:
    data, times = Pool(2.0).bytes, []
    for _ in range(num_rounds):
        started = time.perf_counter()
        for block in data:
            checksum.checksum(block)
        times.append(time.perf_counter() - started)
    return data.nbytes / statistics.median(times) / 1e9


def table(results: dict[str, dict[str, float]], transports: tuple[str, ...]) -> str:
    names = list(dict.fromkeys(name for row in results.values() for name in row))
    lines = ["| block | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {size} MiB | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |" for size, row in results.items()
    ]
    lines += ["", "| block | transport | share of | no sum | with checksum | target |", "|---|---|---|---|---|---|"]
    for size, row in results.items():
        for name in transports:
            raw, least = TARGETS[name]
            bare, whole = row[f"{name}, no sum"] / row[raw], row[name] / row[raw]
            lines.append(f"| {size} MiB | {name} | {raw} | {bare:.0%} | {whole:.0%} | {least:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transports", default="local,tcp,mooncake")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transports = tuple(name for name in args.transports.split(",") if name in TRANSPORTS and name in TARGETS)
    speed = checksum_speed(args.rounds)
    print(f"GB/s, median of {args.rounds} rounds; checksum alone {speed:.2f}\n")
    results = {f"{size:g}": measure(size, transports, args.rounds) for size in SIZES_MIB}
    print(table(results, transports))
    if args.out:
        args.out.write_text(json.dumps({"checksum_gb_s": speed, "gb_s": results}, indent=1))


if __name__ == "__main__":
    main()
