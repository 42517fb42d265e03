"""The tests that every registered transport must pass: it brings the right bytes or none, even if the peer is slow,
dead or sends wrong data.

The peer runs in another process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from kv.blocks.test_layout import TWO_GROUPS
from kv.peer_world import (
    LAYOUT,
    PATIENCE_S,
    Puller,
    RemoteServer,
    ServerSetup,
    block_ids,
    closing,
    contents,
    key,
    keys,
    names,
    rank,
    raw,
    wait_until,
)

from stoker.base.config import HandoffSettings
from stoker.base.ids import BlockId
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName, KvTicket, PeerUnavailable
from stoker.kv.device.checksum import HostBytes
from stoker.kv.device.device_kv import SetKv
from stoker.kv.peer.transports.transport import TRANSPORTS

NUM_BLOCKS = 32
MLA = KvLayout.of(num_layers=3, num_heads=1, width=72, block_tokens=16, dtype="bfloat16", dtype_bytes=2)
LARGE = KvLayout.of(num_layers=8, num_heads=4, width=64, block_tokens=64, dtype="float32", dtype_bytes=4)  # 1 MiB


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> str:
    """Each registered transport that can be used on this machine, according to its own offer."""
    pool = SetKv(LAYOUT, 2, torch.device("cpu"))
    made = TRANSPORTS.get(request.param)("", "127.0.0.1")
    try:
        made.offer(pool)
    except PeerUnavailable as why:
        pytest.skip(f"{request.param} cannot be used here: {why.message}")
    finally:
        made.close()
    return str(request.param)


@pytest.fixture
def settings(transport: str) -> HandoffSettings:
    return HandoffSettings(transports=(transport,), secret="s3cret")


@pytest.fixture
def remote(settings: HandoffSettings) -> Iterator[RemoteServer]:
    server = RemoteServer(ServerSetup(num_blocks=NUM_BLOCKS, settings=settings))
    with closing(server):
        yield server


@pytest.fixture
def puller(settings: HandoffSettings) -> Iterator[Puller]:
    with closing(made := Puller(num_blocks=NUM_BLOCKS, settings=settings)):
        yield made


def in_background(do: object, *args: object) -> threading.Thread:
    thread = threading.Thread(target=do, args=args)  # type: ignore[arg-type]
    thread.start()
    return thread


def num_looks(server: RemoteServer) -> int:
    """How often the client has asked for blocks. If it asks again, it has taken what the last reply offered."""
    return int(server("leases", "num_looks"))


def test_the_bytes_arrive_and_nothing_else_changes(remote: RemoteServer, puller: Puller) -> None:
    expected, before = contents(LAYOUT, NUM_BLOCKS), puller.kv.blocks.clone()
    remote.lease("L", keys(6), block_ids(9, 2, 30, 4, 31, 0), 6, True)
    assert puller.pull(remote.ticket, keys(4, first=1), block_ids(5, 0, 17, 31), first=1) == [True] * 4
    for mine, theirs in zip((5, 0, 17, 31), (2, 30, 4, 31), strict=True):
        assert raw(puller.kv.blocks[mine]) == raw(expected[theirs])
        before[mine] = expected[theirs]
    assert raw(puller.kv.blocks) == raw(before)
    stats = puller.client.stats()
    assert (stats.blocks, stats.num_bytes, stats.corrupt) == (4, 4 * LAYOUT.block_bytes, 0)


def test_many_pulls_use_one_connection_and_release_gives_the_lease_back(remote: RemoteServer, puller: Puller) -> None:
    expected = contents(LAYOUT, NUM_BLOCKS)
    for number in range(20):
        remote.lease(f"L{number}", keys(3, first=number), block_ids(number, number + 1, number + 2), 3, True)
        ticket = replace(remote.ticket, lease_id=f"L{number}")
        assert puller.pull(ticket, keys(3, first=number), block_ids(0, 1, 2)) == [True] * 3
        assert raw(puller.kv.blocks[:3]) == raw(expected[number : number + 3])
        puller.client.release(ticket)
    wait_until(lambda: remote("world", "released") == [f"L{number}" for number in range(20)])
    assert remote("server", "stats").connections <= 2  # one for the pulls, and possibly one of the thread that releases
    assert all(remote("leases", "close", f"L{number}") for number in range(20))
    assert remote("leases", "__len__") == 0


def test_a_peer_with_fewer_blocks_sends_those(remote: RemoteServer, puller: Puller) -> None:
    remote.lease("L", keys(3), block_ids(1, 2, 3), 3, True)
    assert puller.pull(remote.ticket, keys(6), block_ids(*range(6))) == [True] * 3 + [False] * 3
    assert puller.pull(remote.ticket, keys(2, first=3), block_ids(8, 9), first=3) == [False, False]
    assert raw(puller.kv.blocks[:3]) == raw(contents(LAYOUT, NUM_BLOCKS)[1:4])


def test_a_pull_may_begin_before_the_lease_and_grows_with_it(remote: RemoteServer, puller: Puller) -> None:
    blocks = block_ids(*range(8, 18))
    found: list[list[bool]] = []
    pulling = in_background(lambda: found.append(puller.pull(remote.ticket, keys(10), block_ids(*range(10)))))
    wait_until(lambda: num_looks(remote) >= 1)
    remote.lease("L", keys(9), blocks[:9], 0, False)
    for num_ready in (3, 4, 9):
        before = num_looks(remote)
        remote("leases", "put", "L", keys(10), blocks, num_ready, False)
        wait_until(lambda before=before: num_looks(remote) > before)  # the client has those, and asks for more
    remote("leases", "put", "L", keys(10), blocks, 10, True)
    pulling.join(PATIENCE_S)
    assert found == [[True] * 10]
    assert raw(puller.kv.blocks[:10]) == raw(contents(LAYOUT, NUM_BLOCKS)[8:18])


def test_a_pull_ends_when_the_lease_closes(remote: RemoteServer, puller: Puller) -> None:
    remote.lease("L", keys(4), block_ids(1, 2, 3, 4), 2, False)
    found: list[list[bool]] = []
    pulling = in_background(lambda: found.append(puller.pull(remote.ticket, keys(4), block_ids(0, 1, 2, 3))))
    wait_until(lambda: num_looks(remote) >= 2)  # the client has the two ready blocks, and asks for more
    wait_until(lambda: remote("leases", "close", "L"))
    pulling.join(PATIENCE_S / 2)
    assert found == [[True, True, False, False]], "not at its own deadline, but now"
    with pytest.raises(PeerUnavailable, match="closed"):
        puller.pull(remote.ticket, keys(4), block_ids(0, 1, 2, 3))


def test_a_pull_ends_at_its_deadline(remote: RemoteServer, puller: Puller) -> None:
    remote.lease("L", keys(4), block_ids(1, 2, 3, 4), 1, False)
    assert puller.pull(remote.ticket, keys(1), block_ids(0)) == [True]  # the link is open
    for within_s in (0.5, 2.0, 8.0):  # several attempts: a stalled machine may not even have time for the first block
        with suppress(PeerUnavailable):
            assert puller.pull(remote.ticket, keys(4), block_ids(0, 1, 2, 3), within_s=within_s) == [True] + [False] * 3
            break
    else:
        pytest.fail("the ready block did not arrive")
    with pytest.raises(PeerUnavailable):
        puller.pull(replace(remote.ticket, lease_id="none"), keys(4), block_ids(0, 1, 2, 3), within_s=0.5)


def test_other_keys_are_refused(remote: RemoteServer, puller: Puller) -> None:
    remote.lease("L", keys(4), block_ids(1, 2, 3, 4), 4, True)
    with pytest.raises(PeerUnavailable, match="other keys"):
        puller.pull(remote.ticket, [key(0), key(77)], block_ids(0, 1))
    assert puller.pull(remote.ticket, keys(4), block_ids(0, 1, 2, 3)) == [True] * 4, (
        "the refusal was of that pull alone"
    )


def test_a_lease_that_moved_is_read_at_its_new_place(remote: RemoteServer, puller: Puller) -> None:
    remote.lease("L", keys(2), block_ids(1, 2), 2, False)
    assert puller.pull(remote.ticket, keys(2), block_ids(0, 1)) == [True, True]
    remote("leases", "put", "L", keys(2), block_ids(11, 12), 2, True)
    assert puller.pull(remote.ticket, keys(2), block_ids(0, 1)) == [True, True]
    assert raw(puller.kv.blocks[:2]) == raw(contents(LAYOUT, NUM_BLOCKS)[11:13])


def test_threads_may_pull_at_the_same_time(remote: RemoteServer, puller: Puller) -> None:
    expected = contents(LAYOUT, NUM_BLOCKS)
    remote.lease("L", keys(32), block_ids(*range(32)), 32, True)
    found: dict[int, list[bool]] = {}

    def pull(first: int) -> None:
        into = [BlockId(31 - number) for number in range(first, first + 8)]
        for _ in range(10):
            found[first] = puller.pull(remote.ticket, keys(8, first=first), into, first=first)

    threads = [in_background(pull, first) for first in range(0, 32, 8)]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == {first: [True] * 8 for first in range(0, 32, 8)}
    assert raw(puller.kv.blocks) == raw(expected.flip(0))


@pytest.mark.parametrize(
    ("layout", "src", "dst"),
    [
        (LAYOUT, (1, 1), (2, 1)),
        (LAYOUT, (2, 1), (1, 1)),
        (LAYOUT, (1, 2), (2, 1)),
        (LAYOUT, (2, 1), (1, 3)),
        (TWO_GROUPS, (2, 1), (4, 1)),
    ],
    ids=lambda value: "" if isinstance(value, KvLayout) else f"tp{value[0]}pp{value[1]}",
)
def test_ranks_of_another_split_take_their_heads_and_layers(
    settings: HandoffSettings, layout: KvLayout, src: tuple[int, int], dst: tuple[int, int]
) -> None:
    setups = [
        ServerSetup(rank(layout, number, *src), NUM_BLOCKS, settings, engine_id="one")
        for number in range(src[0] * src[1])
    ]
    servers = [RemoteServer(setup) for setup in setups]
    with closing(*servers):
        for server in servers:
            server.lease("L", keys(5), block_ids(3, 1, 4, 15, 9), 5, True)
        servers[0]("world", "join", [server.ticket.address for server in reversed(servers[1:])])
        for number in range(dst[0] * dst[1]):
            ours = rank(layout, number, *dst)
            with closing(puller := Puller(ours, NUM_BLOCKS, settings)):
                assert puller.pull(servers[0].ticket, keys(5), block_ids(*range(5))) == [True] * 5
                assert raw(puller.kv.blocks[:5]) == raw(contents(ours, NUM_BLOCKS)[[3, 1, 4, 15, 9]])
                assert puller.client.stats().num_bytes == 5 * ours.used_bytes


def test_the_latent_of_mla_is_pulled_whole_from_any_rank(settings: HandoffSettings) -> None:
    servers = [RemoteServer(ServerSetup(MLA, NUM_BLOCKS, settings, engine_id="one")) for _ in range(2)]
    with closing(*servers, puller := Puller(MLA, NUM_BLOCKS, settings)):
        for server in servers:
            server.lease("L", keys(3), block_ids(3, 1, 4), 3, True)
        servers[0]("world", "join", [servers[1].ticket.address])
        assert puller.pull(servers[0].ticket, keys(3), block_ids(0, 1, 2)) == [True] * 3
        assert raw(puller.kv.blocks[:3]) == raw(contents(MLA, NUM_BLOCKS)[[3, 1, 4]])
        assert puller.client.stats().num_bytes == 3 * MLA.block_bytes, "once"


def test_reading_ahead_brings_full_blocks_with_their_names(settings: HandoffSettings, remote: RemoteServer) -> None:
    with_tcp = replace(
        settings, transports=(*settings.transports, "tcp") if "tcp" not in settings.transports else ("tcp",)
    )
    server = RemoteServer(ServerSetup(num_blocks=NUM_BLOCKS, settings=with_tcp))
    found: dict[bytes, tuple[BlockName, bytes]] = {}

    def into(some: list[BlockName], data: list[HostBytes]) -> None:
        found.update({name.key: (name, one.tobytes()) for name, one in zip(some, data, strict=True)})

    with closing(server, puller := Puller(num_blocks=NUM_BLOCKS, settings=with_tcp)):
        counts: list[int] = []
        reading = in_background(
            lambda: counts.append(puller.client.read_ahead(server.ticket, into, time.monotonic() + PATIENCE_S))
        )
        wait_until(lambda: num_looks(server) >= 1)
        blocks = block_ids(*range(4, 11))
        server.lease("L", keys(7), blocks, 2, False, names(6))
        wait_until(lambda: len(found) == 2)  # before the lease is complete
        server("leases", "put", "L", keys(7), blocks, 7, True, names(6))
        reading.join(PATIENCE_S)
        assert counts == [6]
    expected = contents(LAYOUT, NUM_BLOCKS)[4:10]
    assert [found[name.key][0] for name in names(6)] == names(6)
    assert [found[name.key][1] for name in names(6)] == [raw(block) for block in expected]


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_a_peer_killed_in_the_middle_of_a_pull_leaves_only_correct_blocks(
    settings: HandoffSettings, delay_s: float
) -> None:
    count = 128
    server = RemoteServer(ServerSetup(LARGE, count, settings))
    with closing(server, puller := Puller(LARGE, count, settings)):
        server.lease("L", keys(count + 1), block_ids(*range(count), 0), count, False)
        assert puller.pull(server.ticket, keys(2), block_ids(0, 1)) == [True, True]
        found: list[list[bool]] = []
        reasons: list[str] = []

        def pull() -> None:
            try:
                found.append(
                    puller.pull(server.ticket, keys(count + 1), block_ids(*range(count), 0), within_s=4 * PATIENCE_S)
                )
            except PeerUnavailable as lost:
                reasons.append(lost.message)

        pulling = in_background(pull)
        time.sleep(delay_s)
        server.kill()
        pulling.join(PATIENCE_S)
        assert len(found) + len(reasons) == 1, "it waits for its deadline"
        expected = contents(LARGE, count)
        for at, is_there in enumerate(found[0] if found else []):
            assert not is_there or at == 0 or raw(puller.kv.blocks[at]) == raw(expected[at])
        with pytest.raises(PeerUnavailable):
            puller.pull(server.ticket, keys(2), block_ids(0, 1))


def test_bytes_with_a_wrong_checksum_are_not_used(settings: HandoffSettings) -> None:
    server = RemoteServer(ServerSetup(LARGE, 8, settings))
    with closing(server, puller := Puller(LARGE, 8, settings)):
        server.lease("L", keys(4), block_ids(1, 2, 3, 4), 4, True)
        server("world", "spoil", 3)
        expected = contents(LARGE, 8)
        for _ in range(5):
            assert puller.pull(server.ticket, keys(4), block_ids(0, 1, 2, 3)) == [True, True, False, True]
        assert raw(puller.kv.blocks[[0, 1, 3]]) == raw(expected[[1, 2, 4]])
        assert puller.client.stats().corrupt == 5


def test_a_stale_ticket_reads_nothing_of_a_restarted_engine(settings: HandoffSettings, puller: Puller) -> None:
    first = RemoteServer(ServerSetup(num_blocks=NUM_BLOCKS, settings=settings))
    stale: KvTicket = first.ticket
    first.lease("L", keys(2), block_ids(1, 2), 2, True)
    assert puller.pull(stale, keys(2), block_ids(0, 1)) == [True, True]
    first.kill()
    port = int(stale.address.rpartition(":")[2])
    second = RemoteServer(ServerSetup(num_blocks=NUM_BLOCKS, settings=replace(settings, port=port), seed=99))
    with closing(first, second):
        assert second.ticket.address == stale.address
        second.lease("L", keys(2), block_ids(1, 2), 2, True)
        before = raw(puller.kv.blocks)
        with pytest.raises(PeerUnavailable, match="engine_id") as refused:
            puller.pull(stale, keys(2), block_ids(0, 1))
        assert refused.value.code == "kv_engine_gone"
        assert raw(puller.kv.blocks) == before
        assert puller.pull(second.ticket, keys(2), block_ids(0, 1)) == [True, True]
