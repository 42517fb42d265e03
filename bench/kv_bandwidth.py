"""How fast blocks go from one worker's pool to another's, by each transport, beside the raw media in the same run.

    python bench/kv_bandwidth.py [--out FILE.json] [--rounds 9] [--transports local,tcp,mooncake]

Two processes on one machine. Every figure is the median of rounds; in each, a transport and its raw medium take turns, and their
ratio is the median of the rounds' own: memcpy between two shared mappings (one thread), a plain socket that fills the same
blocks, Mooncake's bare API, and our pulls. "no sum" is the same pull with a checksum that costs nothing, on both sides: what lies
between it and the pull is the checksum's share.
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.base.config import HandoffSettings
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import KvIdentity, KvTicket, PeerUnavailable
from stoker.kv.device import checksum
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.peer.peer_client import PeerClient
from stoker.kv.peer.peer_server import PeerServer
from stoker.kv.peer.transports.transport import TRANSPORTS

SIZES_MIB = (0.5, 2.0, 8.0)
POOL_BYTES = 128 << 20  # well above the caches
CPU = torch.device("cpu")
# What each transport is measured against, and the share of it that it must reach.
TARGETS = {"local": ("memcpy", 0.8), "tcp": ("socket", 0.8), "mooncake": ("mooncake bare", 0.9)}
REAL_HASH = checksum.xxh3_64  # type: ignore[attr-defined]
NO_SUM = ", no sum"
LEASES = {"no sum": "N", "sum": "L"}  # of the same blocks


class NoHash:
    """In the place of XXH3: bytes move, nothing is checksummed."""

    def __init__(self, data: object = b"") -> None:
        pass

    def update(self, data: object) -> None:
        pass

    def intdigest(self) -> int:
        return 0

    def reset(self) -> None:
        pass


def set_sums(real: bool) -> None:
    checksum.xxh3_64 = REAL_HASH if real else NoHash  # type: ignore[assignment,misc,attr-defined]


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
class Result:
    gb_s: dict[str, float]  # by name
    of_raw: dict[str, float]  # of each transport: the median of the rounds' ratios


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
    server = PeerServer(pool.kv, pool.identity, leases, HandoffSettings(transports=transports), lambda _: None)
    for lease_id in LEASES.values():  # sums are made when blocks become ready
        set_sums(lease_id == LEASES["sum"])
        leases.put(lease_id, pool.keys, pool.ids, pool.count, True)
        while leases.next_unchecked(1, 0.0):
            time.sleep(0.01)
    listener = socket.create_server(("127.0.0.1", 0))
    engine = bare_mooncake(pool) if "mooncake" in transports else None
    bare = (f"127.0.0.1:{engine.get_rpc_port()}", pool.kv.blocks.data_ptr()) if engine else None
    ticket = KvTicket(server.engine_id, server.address, LEASES["sum"], 1, 600.0)
    pipe.send(Peer(ticket, listener.getsockname()[1], bare))
    plain, _ = listener.accept()
    while pipe.recv() != "end":
        for block in pool.bytes:
            plain.sendall(block.data)
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


def pull(client: PeerClient, dst: Pool, ticket: KvTicket) -> None:
    filled = client.pull(ticket, 0, dst.keys, dst.ids, time.monotonic() + 60)
    if not all(filled):
        raise PeerUnavailable(f"{filled.count(False)} of {dst.count} blocks did not come")


def measure(size_mib: float, transports: tuple[str, ...], num_rounds: int) -> Result:
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
    pulls = {name: partial(pull, client, dst) for name, client in clients.items()}
    times: dict[str, list[float]] = {}

    def timed(name: str, way: Callable[[], None]) -> None:
        started = time.perf_counter()
        way()
        times.setdefault(name, []).append(time.perf_counter() - started)

    for number in range(num_rounds + 1):
        for name, way in pulls.items():
            for command, suffix in (("no sum", NO_SUM), ("sum", "")):
                set_sums(command == "sum")
                timed(TARGETS[name][0] + suffix, raw[TARGETS[name][0]])
                timed(name + suffix, partial(way, replace(peer.ticket, lease_id=LEASES[command])))
        if number == 0:
            times.clear()  # pages, connections and links are there from now on
    for client in clients.values():
        client.close()
    pipe.send("end")
    process.join(20)
    plain.close()
    gb_s = {
        name: POOL_BYTES / statistics.median(taken) / 1e9
        for name, taken in times.items()
        if name.removesuffix(NO_SUM) not in raw or not name.endswith(NO_SUM)
    }
    of_raw = {
        name + suffix: statistics.median(
            theirs / ours for theirs, ours in zip(times[TARGETS[name][0] + suffix], times[name + suffix], strict=True)
        )
        for name in pulls
        for suffix in ("", NO_SUM)
    }
    return Result(gb_s, of_raw)


def checksum_speed(num_rounds: int) -> float:
    data, times = Pool(2.0).bytes, []
    for _ in range(num_rounds):
        started = time.perf_counter()
        for block in data:
            checksum.checksum(block)
        times.append(time.perf_counter() - started)
    return data.nbytes / statistics.median(times) / 1e9


def table(results: dict[str, Result], transports: tuple[str, ...]) -> str:
    names = list(dict.fromkeys(name for result in results.values() for name in result.gb_s))
    lines = ["| block | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for size, result in results.items():
        lines.append(f"| {size} MiB | " + " | ".join(f"{result.gb_s[name]:.2f}" for name in names) + " |")
    lines += ["", "| block | transport | share of | no sum | with checksum | target |", "|---|---|---|---|---|---|"]
    for size, result in results.items():
        for name in transports:
            raw, least = TARGETS[name]
            bare, whole = result.of_raw[name + NO_SUM], result.of_raw[name]
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
        report = {size: asdict(result) for size, result in results.items()}
        args.out.write_text(json.dumps({"checksum_gb_s": speed, "by_block_mib": report}, indent=1))


if __name__ == "__main__":
    main()
