"""The KV server and its clients: which clients are accepted, what is refused by name, and what remains when a side is
dead, slow or sends wrong data."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from kv.forked import FORKED
from kv.peer_world import (
    LAYOUT,
    PATIENCE_S,
    Puller,
    RemoteServer,
    ServerSetup,
    World,
    block_ids,
    closing,
    contents,
    identity_of,
    keys,
    names,
    rank,
    raw,
    wait_until,
)

from stoker.base.config import HandoffSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.layout import BlockSlice, KvLayout
from stoker.kv.blocks.transfer import BlockName, KvTicket, PeerUnavailable
from stoker.kv.device.checksum import HostBytes
from stoker.kv.peer.block_bytes import BlockSink
from stoker.kv.peer.lease_book import LeaseView
from stoker.kv.peer.peer_wire import VERSION, BadFrame, BlockReply, BlockRequest, PeerConnection
from stoker.kv.peer.transports.local import LocalLink

TCP = HandoffSettings(transports=("tcp",))
LOCAL = HandoffSettings(transports=("local",))
LARGE = KvLayout.of(num_layers=8, num_heads=4, width=64, block_tokens=64, dtype="float32", dtype_bytes=4)  # 1 MiB
HUGE = replace(LARGE, groups=(replace(LARGE.groups[0], num_layers=128),))  # 16 MiB


@pytest.fixture
def world() -> Iterator[World]:
    made = World(ServerSetup())
    made.leases.put("L", keys(4), block_ids(5, 6, 7, 8), 4, True)
    with closing(made):
        yield made


def refusal_of(world: World, puller: Puller) -> PeerUnavailable:
    with closing(puller), pytest.raises(PeerUnavailable) as refused:
        puller.pull(world.ticket(), keys(4), block_ids(0, 1, 2, 3))
    return refused.value


# ---- which clients are accepted


@pytest.mark.parametrize("part", ["model", "tokenizer", "layout", "dtype"])
def test_a_client_that_differs_is_refused_with_the_name_of_the_field(world: World, part: str) -> None:
    identity = replace(identity_of(LAYOUT), **{part: "other"})
    refusal = refusal_of(world, Puller(identity=identity))
    assert refusal.code == "kv_identity_differs"
    assert refusal.message.startswith(f"{part}: ")
    assert "other there" in refusal.message
    assert world.server.stats().refused == 1


@pytest.mark.parametrize(("theirs", "ours"), [("a", "b"), ("a", None), (None, "b"), ("a", "")])
def test_both_sides_must_have_the_same_secret(theirs: str | None, ours: str | None) -> None:
    with closing(world := World(ServerSetup(settings=HandoffSettings(secret=theirs)))):
        world.leases.put("L", keys(4), block_ids(5, 6, 7, 8), 4, True)
        refusal = refusal_of(world, Puller(settings=HandoffSettings(secret=ours)))
        assert refusal.code == "kv_secret"
        right = Puller(settings=HandoffSettings(secret=theirs))
        with closing(right):
            assert right.pull(world.ticket(), keys(4), block_ids(0, 1, 2, 3)) == [True] * 4


def frame(kind: int, payload: bytes, mark: int = 0x4B56) -> bytes:
    return struct.pack("<HBxI", mark, kind, len(payload)) + payload


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_a_client_that_does_not_wait_for_the_proof_is_refused_without_its_own() -> None:
    with closing(world := World(ServerSetup(settings=HandoffSettings(secret="a")))), dial(world.server.address) as sock:
        body = json.dumps({"engine_id": world.server.engine_id, "identity": {}}).encode()
        sock.sendall(
            frame(1, json.dumps({"version": VERSION, "nonce": "00" * 16}).encode()) + frame(3, bytes(32) + body)
        )
        answer = b""
        while part := sock.recv(4096):
            answer += part
        assert b"kv_secret" in answer
        assert b"layout" not in answer


def test_another_version_is_refused_by_name(world: World) -> None:
    with dial(world.server.address) as sock:
        sock.sendall(frame(1, json.dumps({"version": 99, "nonce": "00" * 16}).encode()))
        assert f"version: {VERSION} here, 99 there".encode() in sock.recv(4096)


def test_a_server_without_a_secret_listens_only_on_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"handoff\.secret"):
        World(ServerSetup(settings=HandoffSettings(host="0.0.0.0")))


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"",
    bytes(64),
    frame(1, b"{"),
    frame(1, b"[]"),
    frame(1, b"[" * 60_000),
    frame(1, json.dumps({"version": VERSION}).encode()),
    frame(1, json.dumps({"version": VERSION, "nonce": 5}).encode()),
    frame(5, b'{"code": "x"}'),
    frame(10, b"no handshake"),
    struct.pack("<HBxI", 0x4B56, 1, 0xFFFFFFFF),
    random.Random(1).randbytes(5000),
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_ends_its_connection_and_nothing_else(world: World, data: bytes) -> None:
    # If the server has not read all bytes, the connection ends with a reset, at any moment.
    with dial(world.server.address) as sock, suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    wait_until(lambda: world.server.stats().connections == 0)
    with closing(puller := Puller()):
        assert puller.pull(world.ticket(), keys(4), block_ids(0, 1, 2, 3)) == [True] * 4


def test_frames_survive_packing_and_truncated_ones_are_bad() -> None:
    ask = BlockRequest("lease ü", 3, keys(5), 7, 0.25, 2, 9)
    assert BlockRequest.unpack(ask.pack()) == ask
    nothing = replace(ask, keys=None)
    assert BlockRequest.unpack(nothing.pack()) == nothing
    answer = BlockReply(LeaseView(1 << 40, block_ids(1, 2), names(2), 9, True), [1 << 63, 5])
    assert BlockReply.unpack(answer.pack()) == answer
    for whole, unpack in ((ask.pack(), BlockRequest.unpack), (answer.pack(), BlockReply.unpack)):
        for end in range(len(whole)):
            try:
                unpack(whole[:end])
            except BadFrame:
                continue
            # A reply may end at the end of a name.
            assert unpack is BlockReply.unpack
            assert len(BlockReply.unpack(whole[:end]).view.names) < 2
    rng = random.Random(2)
    for _ in range(2000):
        for unpack in (BlockRequest.unpack, BlockReply.unpack):
            try:
                unpack(rng.randbytes(rng.randrange(200)))
            except BadFrame:
                continue


# ---- wrong data, slow peers and dead peers


class Proxy:
    """Stands between a client and a server. `change(data, num_before)` returns what the client receives."""

    def __init__(self, address: str, change: Callable[[bytes, int], bytes]) -> None:
        self._target = address
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = dial(self._target)
            far.settimeout(None)
            self._sockets += [near, far]
            threading.Thread(target=self._pump, args=(near, far, lambda data, _: data), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, self._change), daemon=True).start()

    def _pump(self, src: socket.socket, dst: socket.socket, change: Callable[[bytes, int], bytes]) -> None:
        count = 0
        try:
            while data := src.recv(1 << 16):
                dst.sendall(change(data, count))
                count += len(data)
            dst.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            finally:
                one.close()


def test_a_bit_flipped_in_transit_costs_only_its_block() -> None:
    world = World(ServerSetup(LARGE, 8, TCP))
    world.leases.put("L", keys(8), block_ids(*range(8)), 8, True)
    at = 3 * LARGE.block_bytes + 12_345  # in the fourth block, or at its end for bytes that precede the blocks

    def flip(data: bytes, before: int) -> bytes:
        if not before <= at < before + len(data):
            return data
        changed = bytearray(data)
        changed[at - before] ^= 0x10
        return bytes(changed)

    proxy = Proxy(world.server.address, flip)
    with closing(puller := Puller(LARGE, 8, TCP), proxy, world):
        ticket = replace(world.ticket(), address=proxy.address)
        assert puller.pull(ticket, keys(8), block_ids(*range(8))) == [True] * 3 + [False] + [True] * 4
        expected = contents(LARGE, 8)
        for block in (0, 1, 2, 4, 5, 6, 7):
            assert raw(puller.kv.blocks[block]) == raw(expected[block])
        stats = puller.client.stats()
        assert (stats.corrupt, stats.blocks) == (1, 7)


def test_a_pull_from_a_peer_that_stops_sending_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.kv.peer.transports.transport.IO_TIMEOUT_S", 600.0)  # but the silence alone is no reason
    world = World(ServerSetup(LARGE, 8, TCP))
    world.leases.put("L", keys(8), block_ids(*range(8)), 8, True)
    is_over, is_late = threading.Event(), threading.Event()

    def stall(data: bytes, before: int) -> bytes:
        if before > 2 * LARGE.block_bytes and not is_over.wait(PATIENCE_S):
            is_late.set()
        return data

    found: list[bool] = []
    for within_s in (1.0, 4.0, 16.0):  # several attempts: a stalled machine may not even have time for the first block
        proxy = Proxy(world.server.address, stall)
        ticket = replace(world.ticket(), address=proxy.address)
        with closing(puller := Puller(LARGE, 8, TCP), proxy), suppress(PeerUnavailable):
            found = puller.pull(ticket, keys(8), block_ids(*range(8)), within_s=within_s)
            break
    is_over.set()
    world.close()
    assert not is_late.is_set()
    assert found[0]
    assert not found[-1]
    assert found == sorted(found, reverse=True)


def test_a_pull_from_a_slow_peer_ends_at_the_deadline_and_not_at_the_end_of_the_block() -> None:
    world = World(ServerSetup(HUGE, 1, TCP))
    world.leases.put("L", keys(1), block_ids(0), 1, True)
    is_over = threading.Event()

    def trickle(data: bytes, before: int) -> bytes:
        is_over.wait(0.25 if before > 4096 else 0.0)
        return data

    proxy = Proxy(world.server.address, trickle)
    ticket = replace(world.ticket(), address=proxy.address)
    with closing(puller := Puller(HUGE, 1, TCP), proxy, world):
        started_s = time.monotonic()
        with pytest.raises(PeerUnavailable):
            puller.pull(ticket, keys(1), block_ids(0), within_s=1.0)
        assert time.monotonic() - started_s < 15, "all of it takes a minute"
        is_over.set()


@pytest.mark.parametrize("do", ["close", "move"])
def test_blocks_of_a_lease_that_ends_during_the_read_do_not_count(monkeypatch: pytest.MonkeyPatch, do: str) -> None:
    world = World(ServerSetup(settings=LOCAL))
    world.leases.put("L", keys(4), block_ids(5, 6, 7, 8), 4, False)
    copy = LocalLink.copy

    def copy_and_lose(
        self: LocalLink,
        blocks: Sequence[BlockId],
        part: BlockSlice,
        checksums: Sequence[int],
        sink: BlockSink,
        first: int,
    ) -> list[bool]:
        right = copy(self, blocks, part, checksums, sink, first)
        assert right == [True] * 4
        if do == "close":
            assert world.leases.close("L")
        else:
            world.leases.put("L", keys(4), block_ids(5, 6, 7, 9), 4, True)
        return right

    monkeypatch.setattr(LocalLink, "copy", copy_and_lose)
    with closing(puller := Puller(settings=LOCAL), world):
        if do == "close":
            with pytest.raises(PeerUnavailable, match="closed"):
                puller.pull(world.ticket(), keys(5), block_ids(0, 1, 2, 3, 4))
        else:
            assert puller.pull(world.ticket(), keys(4), block_ids(0, 1, 2, 3)) == [False] * 4
        assert puller.client.stats().corrupt == 0


def _pull_for_ever(ticket: KvTicket, started: object) -> None:
    puller = Puller(LARGE, 64, TCP)
    while True:
        puller.pull(ticket, keys(64), block_ids(*range(64)))
        started.set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_dies_or_stops_does_not_block_the_lease(how: signal.Signals) -> None:
    world = World(ServerSetup(LARGE, 64, TCP))
    world.leases.put("L", keys(64), block_ids(*range(64)), 64, True)
    started = FORKED.Event()
    client = FORKED.Process(target=_pull_for_ever, args=(world.ticket(), started), daemon=True)
    client.start()
    with closing(world):
        assert started.wait(PATIENCE_S)
        assert client.pid is not None
        os.kill(client.pid, how)
        wait_until(lambda: world.leases.close("L"))
        assert len(world.leases) == 0
        os.kill(client.pid, signal.SIGKILL)
        client.join(PATIENCE_S)
        wait_until(lambda: world.server.stats().connections == 0)


def test_a_dead_peer_is_forgotten_and_its_memory_with_it() -> None:
    server = RemoteServer(ServerSetup(settings=LOCAL))
    server.lease("L", keys(4), block_ids(5, 6, 7, 8), 4, True)

    def mapped() -> set[str]:
        """The inodes. Pools of this process are mapped too, but may be written to."""
        with open("/proc/self/maps", encoding="ascii") as lines:
            return {line.split()[4] for line in lines if "r--s" in line and "stoker-kv" in line}

    before = mapped()  # mappings that earlier tests left may disappear at any moment
    with closing(puller := Puller(settings=LOCAL), server):
        assert puller.pull(server.ticket, keys(4), block_ids(0, 1, 2, 3)) == [True] * 4
        theirs = mapped() - before
        assert len(theirs) == 1
        server.kill()
        wait_until(lambda: not theirs & mapped())


def test_a_broken_kept_connection_is_replaced(world: World) -> None:
    proxy = Proxy(world.server.address, lambda data, _: data)
    ticket = replace(world.ticket(), address=proxy.address)
    with closing(puller := Puller(settings=TCP), proxy):
        for _ in range(3):
            assert puller.pull(ticket, keys(4), block_ids(0, 1, 2, 3)) == [True] * 4
            for one in proxy._sockets:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


def test_a_lease_is_released_even_if_the_kept_connection_broke_silently(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(world.server.address, lambda data, _: data)
    ticket = replace(world.ticket(), address=proxy.address)
    with closing(puller := Puller(settings=TCP), proxy):
        assert puller.pull(ticket, keys(4), block_ids(0, 1, 2, 3)) == [True] * 4
        monkeypatch.setattr(PeerConnection, "is_idle", lambda connection: True)
        for one in proxy._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        puller.client.release(ticket)
        wait_until(lambda: world.released == ["L"])


def test_releasing_at_a_silent_dead_or_wrong_address_neither_raises_nor_blocks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("peer.remote_peer.IO_TIMEOUT_S", "peer.peer_client._RELEASE_TIMEOUT_S"):
        monkeypatch.setattr(f"stoker.kv.{name}", PATIENCE_S)
    silent = socket.create_server(("127.0.0.1", 0))
    silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
    with closing(puller := Puller()):
        for address in (silent_address, "127.0.0.1:1", "nonsense", "127.0.0.1:99999", world.server.address):
            puller.client.release(replace(world.ticket(), address=address))
        assert world.released == [], "the silent one comes first, and has a minute"
        silent.close()
        wait_until(lambda: world.released == ["L"])


def test_ranks_that_lack_some_of_our_heads_are_refused() -> None:
    half = World(ServerSetup(rank(LAYOUT, 0, 2), settings=TCP))
    half.leases.put("L", keys(2), block_ids(1, 2), 2, True)
    with closing(puller := Puller(settings=TCP), half):
        with pytest.raises(PeerUnavailable, match="heads 0 to 4 of layers 0 to 3") as refused:
            puller.pull(half.ticket(), keys(2), block_ids(0, 1))
        assert refused.value.code == "kv_ranks_missing"


def test_reading_ahead_brings_the_blocks_that_all_ranks_have() -> None:
    ranks = [World(ServerSetup(rank(LAYOUT, number, 2, 2), settings=TCP, engine_id="one")) for number in range(4)]
    ranks[0].join([one.server.address for one in ranks[1:]])
    found: dict[BlockKey, bytes] = {}

    def into(some: list[BlockName], data: list[HostBytes]) -> None:
        found.update({name.key: one.tobytes() for name, one in zip(some, data, strict=True)})

    blocks = block_ids(4, 7, 2, 9)
    with closing(puller := Puller(settings=TCP), *ranks):
        for number, one in enumerate(ranks):
            one.leases.put("L", keys(4), blocks, 1 + number, False, names(4))
        counts: list[int] = []
        deadline_s = time.monotonic() + PATIENCE_S
        reading = threading.Thread(
            target=lambda: counts.append(puller.client.read_ahead(ranks[0].ticket(), into, deadline_s)), daemon=True
        )
        reading.start()
        wait_until(lambda: len(found) == 1)
        for one in ranks:
            one.leases.put("L", keys(4), blocks, 4, True, names(3))
        reading.join(PATIENCE_S)
        assert counts == [3]
    expected = contents(LAYOUT, 32)[[4, 7, 2]]
    assert [found[name.key] for name in names(3)] == [raw(block) for block in expected]


def test_without_one_of_several_ranks_no_block_is_pulled() -> None:
    ranks = [World(ServerSetup(rank(LAYOUT, number, 2), settings=TCP, engine_id="one")) for number in range(2)]
    ranks[0].leases.put("L", keys(2), block_ids(1, 2), 2, True)
    ranks[1].leases.put("L", keys(2), block_ids(1, 2), 1, True)
    ranks[0].join([ranks[1].server.address])
    ticket = ranks[0].ticket()
    with closing(puller := Puller(settings=TCP), *ranks):
        assert puller.pull(ticket, keys(2), block_ids(0, 1)) == [True, False]
        ranks[1].close()
        with pytest.raises(PeerUnavailable):
            puller.pull(ticket, keys(2), block_ids(0, 1))


def test_the_first_transport_that_works_is_used(world: World) -> None:
    """By default `local` for a pool in RAM. A server that allows only tcp is reached by tcp."""
    with closing(puller := Puller()):
        assert puller.pull(world.ticket(), keys(4), block_ids(0, 1, 2, 3)) == [True] * 4
    assert (world.server.stats().located_blocks, world.server.stats().sent_blocks) == (4, 0)
    with closing(plain := World(ServerSetup(settings=TCP)), puller := Puller()):
        plain.leases.put("L", keys(4), block_ids(5, 6, 7, 8), 4, True)
        assert puller.pull(plain.ticket(), keys(4), block_ids(0, 1, 2, 3)) == [True] * 4
        wait_until(lambda: plain.server.stats().sent_blocks == 4)
    with closing(puller := Puller(settings=HandoffSettings(transports=("cuda_ipc",)))):
        with pytest.raises(PeerUnavailable, match="no transport to") as refused:
            puller.pull(world.ticket(), keys(4), block_ids(0, 1, 2, 3))
        assert refused.value.code == "kv_no_transport"


def test_an_empty_pull_does_nothing(world: World) -> None:
    with closing(puller := Puller()):
        assert puller.pull(world.ticket(), [], []) == []


def test_closing_a_server_ends_waiting_pulls_at_once() -> None:
    world = World(ServerSetup(settings=TCP))
    world.leases.put("L", keys(4), block_ids(5, 6, 7, 8), 1, False)
    with closing(puller := Puller(settings=TCP)):
        found: list[list[bool]] = []
        pulling = threading.Thread(
            target=lambda: found.append(puller.pull(world.ticket(), keys(4), block_ids(0, 1, 2, 3)))
        )
        pulling.start()
        wait_until(lambda: world.leases.num_looks >= 2)  # the client has the first block, and asks for more
        world.close()
        pulling.join(PATIENCE_S / 2)
        assert found == [[True, False, False, False]]


def test_strangers_do_not_keep_peers_out() -> None:
    """300 silent connections are more than the server's limit."""
    with closing(world := World(ServerSetup(settings=HandoffSettings(secret="a")))), ExitStack() as stack:
        world.leases.put("L", keys(4), block_ids(5, 6, 7, 8), 4, True)
        for _ in range(300):
            stack.enter_context(dial(world.server.address))
        wait_until(lambda: world.server.stats().connections <= 32)
        with closing(puller := Puller(settings=HandoffSettings(secret="a"))):
            assert puller.pull(world.ticket(), keys(4), block_ids(0, 1, 2, 3)) == [True] * 4
