"""Pulls from a model with several KV sets: each set's blocks come from its own pool, and other sets are refused by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from kv.peer_world import block_ids, contents, identity_of, keys, rank

from stoker.base.config import HandoffSettings
from stoker.kv.blocks.layout import KvGroup, KvLayout
from stoker.kv.blocks.transfer import KvTicket, PeerUnavailable
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.peer.peer_client import PeerClient
from stoker.kv.peer.peer_server import PeerServer
from stoker.kv.peer.peer_wire import BadFrame, BlockRequest
from stoker.kv.peer.transports.transport import TRANSPORTS

CPU = torch.device("cpu")
WINDOW = KvGroup(2, 8, 6, "window", 32)
LAYOUT = KvLayout((KvGroup(2, 4, 8), WINDOW, KvGroup(1, 4, 8, "chunk", 64)), 16, "float32", 4)
SIZES = [12, 6, 5]


@contextmanager
def peers(theirs: list[KvLayout], ours: KvLayout, transport: str = "tcp") -> Iterator[tuple[PeerClient, KvTicket]]:
    """Servers of ranks with filled pools and a complete lease, and a client with an empty pool."""
    settings = HandoffSettings(transports=(transport,))
    servers = []
    for layout in theirs:
        kv, leases = DeviceKv(layout, SIZES[: len(layout.sets)], CPU), LeaseBook()
        for kv_set, (one, memory) in enumerate(zip(layout.sets, kv.sets, strict=True)):
            memory.blocks.copy_(contents(one.layout, memory.num_blocks, seed=kv_set))
            leases.put("lease", keys(3, first=10 * kv_set), block_ids(4, 0, 2), 3, complete=True, kv_set=kv_set)
        servers.append(PeerServer(kv, identity_of(layout), leases, settings, lambda lease_id: None, "engine"))
    client = PeerClient(DeviceKv(ours, SIZES[: len(ours.sets)], CPU), identity_of(ours), settings)
    try:
        servers[0].other_ranks = [server.address for server in servers[1:]]
        yield client, KvTicket("engine", servers[0].address, "lease", 48, 60.0)
    finally:
        client.close()
        for server in servers:
            server.close()


def test_groups_that_keep_the_same_tokens_share_a_set() -> None:
    groups = (WINDOW, KvGroup(2, 4, 8), KvGroup(3, 8, 6), KvGroup(1, 4, 8, "chunk", 64), replace(WINDOW, num_layers=1))
    layout = KvLayout(groups, 16, "float32", 4)
    assert [(one.reach.name, one.groups) for one in layout.sets] == [
        ("", (1, 2)),
        ("window32", (0, 4)),
        ("chunk64", (3,)),
    ]
    alone = KvLayout((KvGroup(2, 4, 8), KvGroup(3, 8, 6)), 16, "float32", 4)
    assert alone.sets[0].layout is alone, "a model with one set keeps its bytes and its fingerprint"
    kv = DeviceKv(layout, [4, 3, 2], CPU)
    assert [group.kv_set for group in kv.groups] == [1, 0, 0, 2, 1]
    assert kv.num_bytes == sum(
        count * one.layout.block_bytes for count, one in zip([4, 3, 2], layout.sets, strict=True)
    )


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "cuda_ipc"])
@pytest.mark.parametrize("tp", [1, 2])
def test_each_set_is_pulled_from_its_own_pool(transport: str, tp: int) -> None:
    theirs = [LAYOUT] if tp == 1 else [rank(LAYOUT, number, tp) for number in range(tp)]
    with peers(theirs, LAYOUT, transport) as (client, ticket):
        for kv_set, one in enumerate(LAYOUT.sets):
            into = block_ids(1, 3, 0)
            try:
                pulled = client.pull(ticket, 0, keys(3, 10 * kv_set), into, time.monotonic() + 60, kv_set)
            except PeerUnavailable as error:
                if error.code == "kv_no_transport":
                    pytest.skip(error.message)
                raise
            assert pulled == [True] * 3
            expected = contents(one.layout, SIZES[kv_set], seed=kv_set)[[4, 0, 2]]
            assert torch.equal(client._kv.sets[kv_set].blocks[[1, 3, 0]], expected)
        with pytest.raises(PeerUnavailable, match="other keys"):
            client.pull(ticket, 0, keys(3), block_ids(1, 2, 3), time.monotonic() + 60, 1)


@pytest.mark.parametrize(
    "other",
    [replace(WINDOW, extent=33), KvGroup(2, 8, 6, "chunk", 32), KvGroup(2, 8, 6)],
    ids=["extent", "kind", "full"],
)
def test_a_peer_with_other_sets_is_refused_by_name(other: KvGroup) -> None:
    ours = replace(LAYOUT, groups=(LAYOUT.groups[0], other, LAYOUT.groups[2]))
    with peers([LAYOUT], ours) as (client, ticket), pytest.raises(PeerUnavailable) as refused:
        client.pull(ticket, 0, keys(3), block_ids(1, 2, 3), time.monotonic() + 60)
    assert refused.value.code == "kv_identity_differs"
    assert "layout: " in refused.value.message
    assert "window32-2x2x8x16x6" in refused.value.message


def test_a_request_names_its_set_and_one_that_does_not_exist_is_refused() -> None:
    request = BlockRequest("lease", 2, keys(2), 2, 0.5, 0, 4, kv_set=2)
    assert BlockRequest.unpack(request.pack()) == request
    some = replace(request, layers=(range(1, 3), range(4, 4)))
    assert BlockRequest.unpack(some.pack()) == some
    for part in (replace(request, tokens=range(8, 16)), replace(some, tokens=range(1), keys=None)):
        assert BlockRequest.unpack(part.pack()) == part
        for end in range(len(part.pack()) - 3, len(part.pack())):
            with pytest.raises(BadFrame):
                BlockRequest.unpack(part.pack()[:end])
    plain = replace(request, kv_set=0)
    assert plain.pack()[20 + 1] == 1, "older releases send and expect 1 for a request with keys"
    kv = DeviceKv(LAYOUT, SIZES, CPU)
    server = PeerServer(kv, identity_of(LAYOUT), LeaseBook(), HandoffSettings(), lambda lease_id: None)
    try:
        with pytest.raises(BadFrame, match="KV set 3 requested from a model that has 3"):
            server._request(replace(request, kv_set=3).pack())
        with pytest.raises(BadFrame, match="heads 0 to 8 of layers 0 to 1 requested"):
            server._request(replace(request, end_head=8).pack())
        with pytest.raises(BadFrame, match="tokens 8 to 17 requested"):
            server._request(replace(request, tokens=range(8, 17)).pack())
    finally:
        server.close()


def test_a_lease_with_several_sets_closes_only_when_none_is_read() -> None:
    book = LeaseBook()
    for kv_set in (0, 1):
        book.put("lease", keys(1), block_ids(7), 1, complete=True, kv_set=kv_set)
    view = book.view("lease", 0, keys(1), 1, kv_set=1)
    with book.reading("lease", view.generation) as may_read:
        assert may_read
        assert not book.close("lease")
    assert book.close("lease")
    with pytest.raises(PeerUnavailable, match="closed"):
        book.view("lease", 0, keys(1), 1)
