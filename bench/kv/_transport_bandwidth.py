"""The measuring part of `transport_bandwidth`."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.contract import Report, Result
from bench.kv.transport_bandwidth import TARGETS
from stoker.base.config import HandoffSettings
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import KvIdentity, KvTicket, PeerUnavailable
from stoker.kv.device import checksum
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.peer.peer_client import PeerClient
from stoker.kv.peer.peer_server import PeerServer

SIZES_MIB = (0.5, 2.0, 8.0)
POOL_BYTES = 128 << 20  # well above the caches
CPU = torch.device("cpu")
REAL_HASH = checksum.xxh3_64  # type: ignore[attr-defined]
NO_CHECKSUM = ", no checksum"
LEASES = {"no checksum": "N", "checksum": "L"}  # two leases of the same blocks


class NoHash:
    """Replaces XXH3: bytes move, but no checksum is computed."""

    def __init__(self, data: object = b"") -> None:
        pass

    def update(self, data: object) -> None:
        pass

    def intdigest(self) -> int:
        return 0

    def reset(self) -> None:
        pass


def set_checksums(real: bool) -> None:
    checksum.xxh3_64 = REAL_HASH if real else NoHash  # type: ignore[assignment,misc,attr-defined]


class BandwidthPool:
    """A KV pool of POOL_BYTES with blocks of the given size."""

    def __init__(self, size_mib: float) -> None:
        # 8 layers of one head and 64 tokens, float32; the head's width gives the block size.
        self.layout = KvLayout.of(8, 1, int(size_mib * (1 << 20)) // (8 * 2 * 64 * 4), 64, "float32", 4)
        self.count = POOL_BYTES // self.layout.block_bytes
        self.kv = DeviceKv(self.layout, self.count, CPU)
        self.kv.blocks.normal_()  # touches every page
        blocks = self.kv.sets[0].host_blocks()
        assert blocks is not None
        self.bytes: NDArray[np.uint8] = blocks
        self.identity = KvIdentity("bench", "bench", self.layout.identity, self.layout.dtype)
        self.ids = [BlockId(number) for number in range(self.count)]
        self.keys = [BlockKey(number.to_bytes(16, "little")) for number in range(self.count)]


@dataclass(frozen=True)
class Bandwidths:
    gb_s: dict[str, float]  # by name
    of_raw: dict[str, float]  # of each transport: the median of the rounds' ratios


@dataclass(frozen=True)
class PeerProcess:
    ticket: KvTicket
    socket_port: int
    mooncake: tuple[str, int] | None  # segment, base address


def bare_mooncake(pool: BandwidthPool) -> Any:
    from mooncake.engine import TransferEngine

    engine, base = TransferEngine(), pool.kv.blocks.data_ptr()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(base, pool.bytes.nbytes):
        raise PeerUnavailable("mooncake does not start")
    return engine


def serve(pipe: Connection, size_mib: float, transports: tuple[str, ...]) -> None:
    """Run in the other process: its pool behind a PeerServer, a plain socket and Mooncake's bare engine."""
    torch.set_num_threads(1)
    pool, leases = BandwidthPool(size_mib), LeaseBook()
    server = PeerServer(pool.kv, pool.identity, leases, HandoffSettings(transports=transports), lambda _: None)
    for lease_id in LEASES.values():  # checksums are computed when blocks become ready
        set_checksums(lease_id == LEASES["checksum"])
        leases.put(lease_id, pool.keys, pool.ids, pool.count, True)
        while leases.next_unchecked(1, 0.0):
            time.sleep(0.01)
    listener = socket.create_server(("127.0.0.1", 0))
    engine = bare_mooncake(pool) if "mooncake" in transports else None
    bare = (f"127.0.0.1:{engine.get_rpc_port()}", pool.kv.blocks.data_ptr()) if engine else None
    ticket = KvTicket(server.engine_id, server.address, LEASES["checksum"], 1, 600.0)
    pipe.send(PeerProcess(ticket, listener.getsockname()[1], bare))
    plain, _ = listener.accept()
    while pipe.recv() != "end":
        for block in pool.bytes:
            plain.sendall(block.data)
    server.close()


def memcpy(src: BandwidthPool, dst: BandwidthPool) -> None:
    for mine, theirs in zip(dst.bytes, src.bytes, strict=True):
        np.copyto(mine, theirs)


def plain_socket(pipe: Connection, plain: socket.socket, dst: BandwidthPool) -> None:
    pipe.send("send")
    for block in dst.bytes:
        at, view = 0, block.data
        while at < len(view):
            at += plain.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)


def bare_read(engine: Any, segment: str, base: int, dst: BandwidthPool) -> None:
    size = dst.layout.block_bytes
    ours = [dst.kv.blocks.data_ptr() + number * size for number in dst.ids]
    if engine.batch_transfer_sync_read(segment, ours, [base + number * size for number in dst.ids], [size] * dst.count):
        raise PeerUnavailable("mooncake's bare read failed")


def pull(client: PeerClient, dst: BandwidthPool, ticket: KvTicket) -> None:
    filled = client.pull(ticket, 0, dst.keys, dst.ids, time.monotonic() + 60)
    if not all(filled):
        raise PeerUnavailable(f"{filled.count(False)} of {dst.count} blocks did not arrive")


def measure(size_mib: float, transports: tuple[str, ...], num_rounds: int) -> Bandwidths:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, size_mib, transports), daemon=True)
    process.start()
    peer: PeerProcess = pipe.recv()
    src, dst = BandwidthPool(size_mib), BandwidthPool(size_mib)
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
            for command, suffix in (("no checksum", NO_CHECKSUM), ("checksum", "")):
                set_checksums(command == "checksum")
                timed(TARGETS[name][0] + suffix, raw[TARGETS[name][0]])
                timed(name + suffix, partial(way, replace(peer.ticket, lease_id=LEASES[command])))
        if number == 0:
            times.clear()  # the first round touches pages and opens connections
    for client in clients.values():
        client.close()
    pipe.send("end")
    process.join(20)
    plain.close()
    gb_s = {
        name: POOL_BYTES / statistics.median(taken) / 1e9
        for name, taken in times.items()
        if name.removesuffix(NO_CHECKSUM) not in raw or not name.endswith(NO_CHECKSUM)
    }
    of_raw = {
        name + suffix: statistics.median(
            theirs / ours for theirs, ours in zip(times[TARGETS[name][0] + suffix], times[name + suffix], strict=True)
        )
        for name in pulls
        for suffix in ("", NO_CHECKSUM)
    }
    return Bandwidths(gb_s, of_raw)


def checksum_speed(num_rounds: int) -> float:
    data, times = BandwidthPool(2.0).bytes, []
    for _ in range(num_rounds):
        started = time.perf_counter()
        for block in data:
            checksum.checksum(block)
        times.append(time.perf_counter() - started)
    return data.nbytes / statistics.median(times) / 1e9


def measure_all(transports: tuple[str, ...], num_rounds: int) -> Report:
    torch.set_num_threads(1)
    speed = checksum_speed(num_rounds)
    report = Report([Result("2 MiB blocks", "checksum alone", "GB/s", speed, "higher")], {"checksum_gb_s": speed})
    for size in SIZES_MIB:
        found = measure(size, transports, num_rounds)
        report.details[f"{size:g}"] = {"gb_s": found.gb_s, "of_raw": found.of_raw}
        for name in transports:
            raw, target = TARGETS[name]
            notes = f"{found.of_raw[name]:.0%} of {raw} by rounds; target {target:.0%}"
            report.results.append(
                Result(f"{name}, {size:g} MiB blocks", "pull with checksum", "GB/s", found.gb_s[name], "higher",
                       raw, found.gb_s[raw], "baseline", notes)
            )  # fmt: skip
    return report
