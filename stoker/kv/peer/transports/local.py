"""Shared memory: a worker of the same machine and user maps the peer's pool and copies out of it.

The pool in RAM is an anonymous file. The peer names its file descriptor, and this side opens the same file through
/proc. Device and inode are compared to make sure that it is that file. CONFIRM makes sure that the peer is alive and
that the blocks still belong to the lease.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stoker.base.ids import BlockId
from stoker.kv.blocks.layout import BlockSlice, KvLayout
from stoker.kv.blocks.transfer import PeerUnavailable
from stoker.kv.device.checksum import HostBytes, checksums, copy_with_checksums
from stoker.kv.device.device_kv import SetKv
from stoker.kv.device.helper_threads import HelperThreads, num_copy_threads
from stoker.kv.peer.block_bytes import BeforeWrite, BlockSink, gather
from stoker.kv.peer.transports.transport import TRANSPORTS, OneSidedLink


def _this_machine() -> dict[str, Any]:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"boot_id": boot_id, "uid": os.getuid()}


@TRANSPORTS.register("local")
class LocalTransport:
    def __init__(self, argument: str, host: str) -> None:
        self._threads = HelperThreads(num_copy_threads(), "kv-copy")

    def offer(self, kv: SetKv) -> dict[str, Any]:
        if kv.memory_fd is None:
            raise PeerUnavailable(f"the pool is on {kv.blocks.device}")
        file = os.fstat(kv.memory_fd)
        place = {"pid": os.getpid(), "fd": kv.memory_fd, "device": file.st_dev, "inode": file.st_ino}
        return _this_machine() | place | {"num_bytes": file.st_size}

    def open(self, offer: dict[str, Any], peer: KvLayout, kv: SetKv, before_write: BeforeWrite) -> LocalLink:
        for field, here in _this_machine().items():
            if offer.get(field) != here:
                raise PeerUnavailable(f"{field}: {here} here, {offer.get(field)} there")
        try:
            memory = _map(f"/proc/{int(offer['pid'])}/fd/{int(offer['fd'])}", offer)
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise PeerUnavailable(f"the peer's memory cannot be mapped: {error!r}") from error
        return LocalLink(peer, memory, self._threads)

    def close(self) -> None:
        self._threads.close()


def _map(path: str, offer: dict[str, Any]) -> HostBytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        file = os.fstat(fd)
        found = (file.st_dev, file.st_ino, file.st_size)
        if found != (offer["device"], offer["inode"], offer["num_bytes"]):
            raise ValueError(f"{path} is another file: {found}")
        return np.frombuffer(mmap.mmap(fd, file.st_size, access=mmap.ACCESS_READ), dtype=np.uint8)
    finally:
        os.close(fd)


class LocalLink(OneSidedLink):
    def __init__(self, peer: KvLayout, memory: HostBytes, threads: HelperThreads) -> None:
        super().__init__(peer)
        self._threads = threads
        self._pool = memory[: len(memory) // peer.block_bytes * peer.block_bytes].reshape(-1, peer.block_bytes)

    def copy(
        self, blocks: Sequence[BlockId], part: BlockSlice, expected: Sequence[int], sink: BlockSink, first: int
    ) -> list[bool]:
        if max(blocks) >= len(self._pool):
            raise PeerUnavailable(f"block {max(blocks)} of a peer that has {len(self._pool)}")
        batch_size = len(blocks) if sink.is_direct else 1
        right: list[bool] = []
        for start in range(0, len(blocks), batch_size):
            batch = range(start, start + batch_size)
            actual = self._copy([sink.buffer(first + i) for i in batch], [blocks[i] for i in batch], part)
            right += [value == expected[i] for i, value in zip(batch, actual, strict=True)]
            for i in batch:
                if right[i]:
                    sink.place(first + i)
        return right

    def _copy(self, buffers: list[HostBytes], blocks: list[BlockId], part: BlockSlice) -> list[int]:
        if part.is_one_run:
            (run,) = part.runs
            runs = [self._pool[block, run.offset : run.offset + run.num_bytes] for block in blocks]
            return copy_with_checksums(self._threads, buffers, runs)
        for buffer, block in zip(buffers, blocks, strict=True):
            gather(self._pool[block], part, buffer)
        return checksums(self._threads, buffers)
