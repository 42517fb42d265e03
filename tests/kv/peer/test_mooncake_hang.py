"""A peer that hangs, with the real Transfer Engine: the read fails within seconds, and nothing is written after that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
from stopping import stopped

from stoker.kv.mooncake.master import is_installed
from stoker.kv.mooncake.transfer_engine import RemoteRanges, configure_environment, read_in_order

pytestmark = pytest.mark.skipif(not is_installed(), reason="Mooncake is not installed")

SIZE, COUNT = 1 << 18, 256


def engine_of(memory: np.ndarray) -> object:
    configure_environment()
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return engine


def serve(pipe: Connection) -> None:
    memory = np.full((COUNT, SIZE), 7, np.uint8)
    engine = engine_of(memory)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", memory.ctypes.data))  # type: ignore[attr-defined]
    pipe.recv()


def test_a_read_from_a_hanging_peer_fails_and_writes_nothing_later() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    segment, base = pipe.recv()
    memory = np.zeros((COUNT, SIZE), np.uint8)
    engine = engine_of(memory)
    runs = [RemoteRanges(segment, [memory[at].ctypes.data], [base + at * SIZE], [SIZE]) for at in range(COUNT)]
    assert all(read_in_order(engine, runs))
    assert (memory == 7).all()

    memory[:] = 0
    with stopped(process.pid):
        started_s = time.monotonic()
        came = list(read_in_order(engine, runs))
        assert time.monotonic() - started_s < 60, "one after the other they take ten minutes"
    assert not any(came[8:]), "nothing is asked for after the first that failed"
    memory[:] = 0
    time.sleep(1.0)  # the peer continues now
    assert not memory.any()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
