"""A KV server without free file descriptors, and a client that asks for blocks that never arrive."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kv.peer_world import Puller, RemoteServer, ServerSetup, World, block_ids, closing, keys, wait_until
from stopping import stopped

from stoker.base.address import join_address, split_address
from stoker.base.config import HandoffSettings
from stoker.kv.blocks.transfer import PeerUnavailable
from stoker.kv.peer import peer_client
from stoker.kv.peer.peer_wire import FrameKind


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken = []
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_a_server_accepts_peers_again_after_it_ran_out_of_file_descriptors() -> None:
    world = World(ServerSetup())
    world.leases.put("L", keys(2), block_ids(5, 6), 2, True)
    with closing(world, puller := Puller(), one := socket.socket()):
        with no_more_files():
            one.connect(split_address(world.server.address))
            time.sleep(0.3)  # the server has tried to accept it
        assert puller.pull(world.ticket(), keys(2), block_ids(0, 1)) == [True, True]


def test_nonsense_from_a_peer_does_not_end_the_release_thread() -> None:
    nonsense = b"[" * 60_000
    world = World(ServerSetup())
    world.leases.put("L", keys(2), block_ids(5, 6), 2, True)
    with closing(world, puller := Puller(), liar := socket.create_server(("127.0.0.1", 0))):
        theirs = join_address(*liar.getsockname())
        puller.client.release(replace(world.ticket(), address=theirs))
        sock, _ = liar.accept()
        with sock:
            sock.sendall(struct.pack("<HBxI", 0x4B56, FrameKind.CHALLENGE, len(nonsense)) + nonsense)
            puller.client.release(world.ticket())
            wait_until(lambda: world.released == ["L"])


def test_a_silent_peer_delays_the_release_of_other_leases_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own leases expire, so that releasing each of them need not be tried."""
    world = World(ServerSetup())
    world.leases.put("L", keys(2), block_ids(5, 6), 2, True)
    monkeypatch.setattr(peer_client, "_RELEASE_PAUSE_S", 600.0)  # however long the test is delayed
    with closing(world, puller := Puller(), silent := socket.create_server(("127.0.0.1", 0), backlog=64)):
        gone = replace(world.ticket(), address=join_address(*silent.getsockname()), engine_id="gone")
        for number in range(8):
            puller.client.release(replace(gone, lease_id=f"G{number}"))
        puller.client.release(world.ticket())
        wait_until(lambda: world.released == ["L"])
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_read_ahead_does_not_wait_long_for_a_lease_that_never_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "_LEASE_OPEN_TIMEOUT_S", 0.5)
    with closing(world := World(ServerSetup()), puller := Puller()):
        started_s = time.monotonic()
        with pytest.raises(PeerUnavailable) as refused:
            puller.client.read_ahead(world.ticket("refused"), lambda names, data: None, started_s + 60)
        assert refused.value.code == "kv_lease_unknown"
        assert time.monotonic() - started_s < 30


def test_read_ahead_waits_for_a_lease_that_is_open_and_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "_LEASE_OPEN_TIMEOUT_S", 0.0)
    with closing(world := World(ServerSetup()), puller := Puller()):
        world.leases.put("L", keys(1), block_ids(5), 0, False)
        came: list[int] = []
        reading = threading.Thread(
            target=lambda: came.append(
                puller.client.read_ahead(world.ticket(), lambda names, data: None, time.monotonic() + 60)
            )
        )
        reading.start()
        wait_until(lambda: world.leases.num_looks >= 2)
        world.leases.put("L", keys(1), block_ids(5), 1, True)
        reading.join(30)
        assert came == [0]  # it has no name, so there is nothing to keep, and nothing failed


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_a_pull_from_a_stopped_peer_ends_at_the_deadline(transport: str) -> None:
    settings = HandoffSettings(transports=(transport,))
    with closing(remote := RemoteServer(ServerSetup(settings=settings)), puller := Puller(settings=settings)):
        remote.lease("L", keys(2), block_ids(5, 6), 2, True)
        assert puller.pull(remote.ticket, keys(2), block_ids(0, 1)) == [True, True]
        assert remote.process.pid is not None
        with stopped(remote.process.pid):
            started_s = time.monotonic()
            with pytest.raises(PeerUnavailable):
                puller.pull(remote.ticket, keys(2), block_ids(0, 1), within_s=0.5)
            assert time.monotonic() - started_s < 4
