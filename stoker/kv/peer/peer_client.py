"""PeerClient: pulls blocks from the workers that a ticket names, into this engine's pool or into host memory.

A ticket names the first rank of an engine, which tells the addresses of the others. Each rank has some of the layers,
heads and tokens of a block; they are re-sliced if the engines are split in different ways. A failure is reported, costs a
recomputation, and never takes longer than the deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stoker.base.config import HandoffSettings
from stoker.base.ids import BlockId, BlockKey
from stoker.base.log import EventLog
from stoker.kv.blocks.layout import BlockPart, KvLayout, block_slice
from stoker.kv.blocks.transfer import BlockName, KvIdentity, KvTicket, PeerUnavailable
from stoker.kv.device.checksum import HostBytes
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.block_bytes import HostSink, sink_of
from stoker.kv.peer.lease_book import LeaseView
from stoker.kv.peer.peer_wire import MAX_BLOCKS, BlockRequest, FrameKind, PeerLost
from stoker.kv.peer.rank_cover import cover
from stoker.kv.peer.remote_peer import RemotePeer
from stoker.kv.peer.transports.transport import PullProgress, make_transports

# How long a peer waits for more blocks before it replies that there are none. It is short, so that a dead peer is
# noticed.
_MAX_SERVER_WAIT_S = 1.0
_RELEASE_TIMEOUT_S = 2.0
_RELEASE_PAUSE_S = 10.0  # after a failed release, no other is sent to that peer for this long; its leases expire
_LEASE_OPEN_TIMEOUT_S = 5.0  # how long a lease may take to open; if its request was refused, it never opens
_SWEEP_INTERVAL_S = 1.0
_MAX_PEERS = 256  # ranks count one by one
_MAX_RELEASES = 4096
_AHEAD_BYTES = 64 << 20  # host memory that a read-ahead fills before it passes the blocks on
_log = EventLog("kv.peer_client")


@dataclass(slots=True)
class PeerClientStats:
    """Counters since the start."""

    pulls: int = 0
    failed_pulls: int = 0  # pulls that brought no block
    blocks: int = 0
    num_bytes: int = 0
    corrupt: int = 0  # blocks that arrived with a wrong checksum
    seconds: float = 0.0  # time spent in pulls, including waiting


@dataclass(frozen=True, slots=True)
class _RankShare:
    """The part of the blocks of a KV set that one peer provides, counted in the set's own layout."""

    peer: RemotePeer
    part: BlockPart
    kv_set: int
    is_all: bool  # all layers that the peer holds


def _no_wait(stream: torch.cuda.Stream) -> None:
    """The caller has already waited until no work on the device uses the blocks."""


class PeerClient:
    """Pulls blocks and releases leases. Thread-safe."""

    def __init__(
        self,
        kv: DeviceKv,
        identity: KvIdentity,
        settings: HandoffSettings,
        before_write: Callable[[torch.cuda.Stream], None] = _no_wait,
    ) -> None:
        """`before_write` is called before a pull writes to a pool on a GPU, with the stream that will write. It makes the
        stream wait until no work uses the blocks any more."""
        self._kv = kv
        self._identity = identity
        self._settings = settings
        self._before_write = before_write
        self._transports = make_transports(settings)
        self._lock = threading.Lock()
        self._stats = PeerClientStats()
        self._peers: OrderedDict[tuple[str, str], RemotePeer] = OrderedDict()
        self._releases: queue.Queue[KvTicket | None] = queue.Queue(_MAX_RELEASES)
        self._releaser = threading.Thread(target=self._release_loop, name="kv-release", daemon=True)
        self._releaser.start()

    def stats(self) -> PeerClientStats:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._stats)

    def pull(
        self,
        ticket: KvTicket,
        first_index: int,
        keys: Sequence[BlockKey],
        into: Sequence[BlockId],
        deadline_s: float,
        kv_set: int = 0,
    ) -> list[bool]:
        """Pull blocks `first_index` and following of the lease in a KV set, which must have exactly these keys, into the
        blocks `into` of our pool.

        Blocks until done; called on a loader thread. Returns for each block whether its bytes are there with the right
        checksum. Waits until `deadline_s` (monotonic) for blocks that the peer is still computing. Raises
        PeerUnavailable with the reason if no block arrived.
        """
        started_s = time.monotonic()
        filled, failure = [True] * len(keys), None
        try:
            shares = self._shares(ticket, deadline_s, kv_set) if keys else []
        except PeerUnavailable:
            self._count_pull(False, started_s)
            raise
        for share in shares:
            memory = self._kv.sets[kv_set]
            part = block_slice(memory.layout, share.part)
            pull = PullProgress(sink_of(memory, into, part, self._before_write), [False] * len(keys), deadline_s)
            failure = self._pull_share(share, ticket.lease_id, first_index, keys, pull) or failure
            filled = [before and now for before, now in zip(filled, pull.filled, strict=True)]
            self._count(sum(pull.filled), pull.num_corrupt, pull.sink.part.total_bytes)
        self._count_pull(any(filled), started_s)
        if failure is not None:
            _log.warning(
                "kv_pull_ended_early", peer=ticket.address, lease=ticket.lease_id, requested=len(keys), filled=sum(filled),
                reason=failure.message,
            )  # fmt: skip
            if not any(filled):
                raise failure
        return filled

    def read_ahead(
        self,
        ticket: KvTicket,
        into: Callable[[list[BlockName], list[HostBytes]], None],
        deadline_s: float,
        kv_set: int = 0,
    ) -> int:
        """Pull full blocks of the lease in a KV set into new host memory as they become ready, and pass them to `into`, until the
        lease is complete. Returns how many there were."""
        shares = self._shares(ticket, deadline_s, kv_set)
        layout, first, count = self._kv.sets[kv_set].layout, 0, 0
        opens_by_s = time.monotonic() + _LEASE_OPEN_TIMEOUT_S
        parts = [block_slice(layout, share.part) for share in shares]
        num_blocks = min(MAX_BLOCKS, max(1, _AHEAD_BYTES // layout.block_bytes))
        while True:
            data: list[HostBytes] = [np.empty(layout.block_bytes, np.uint8) for _ in range(num_blocks)]
            for buffer in data:
                buffer[layout.used_bytes :] = 0  # no peer sends these bytes
            pulls = [PullProgress(HostSink(data, part, None), [False] * num_blocks, deadline_s) for part in parts]
            failure, is_end = None, True
            for share, pull in zip(shares, pulls, strict=True):
                try:
                    view = self._round(share, ticket.lease_id, first, None, pull, opens_by_s)
                    is_end = is_end and view.complete and view.num_ready <= first + pull.num_done
                except PeerUnavailable as error:
                    failure = error
                    break
            # Blocks that not all ranks have brought are pulled again.
            num_done, names = min(pull.num_done for pull in pulls), pulls[0].names
            # Only full blocks have names: the last block of a lease may be partly filled.
            good = [i for i in range(min(num_done, len(names))) if all(pull.filled[i] for pull in pulls)]
            if good:
                into([names[i] for i in good], [data[i] for i in good])
            for pull, part in zip(pulls, parts, strict=True):
                self._count(sum(pull.filled), pull.num_corrupt, part.total_bytes)
            first, count = first + num_done, count + len(good)
            if failure is not None:
                if not count:
                    raise failure
                return count
            if is_end:
                return count

    def release(self, ticket: KvTicket) -> None:
        """Tell the peer that the blocks are no longer needed, on a thread of its own. If that fails, the lease expires."""
        try:
            self._releases.put_nowait(ticket)
        except queue.Full:
            _log.warning("kv_release_dropped", peer=ticket.address, lease=ticket.lease_id)

    def close(self) -> None:
        try:
            self._releases.put(None, timeout=_RELEASE_TIMEOUT_S)
        except queue.Full:
            _log.warning("kv_releases_left", count=self._releases.qsize())
        self._releaser.join(2 * _RELEASE_TIMEOUT_S)
        with self._lock:
            peers, self._peers = list(self._peers.values()), OrderedDict()
        for peer in peers:
            peer.close()
        for transport in self._transports.values():
            transport.close()

    def _pull_share(
        self, share: _RankShare, lease_id: str, first_index: int, keys: Sequence[BlockKey], pull: PullProgress
    ) -> PeerUnavailable | None:
        """Pull all blocks of one rank, round by round. Returns the error that ended it early."""
        try:
            while pull.num_done < len(keys):
                view = self._round(share, lease_id, first_index, keys, pull, pull.until_s)
                if view.complete and view.num_ready <= first_index + pull.num_done:
                    return None  # the lease has no more blocks
        except PeerUnavailable as failure:
            return failure
        finally:
            pull.sink.finish()
        return None

    def _round(
        self,
        share: _RankShare,
        lease_id: str,
        first_index: int,
        keys: Sequence[BlockKey] | None,
        pull: PullProgress,
        opens_by_s: float,
    ) -> LeaseView:
        """Pull what is ready now or within a second. A lease that is not open yet is waited for until `opens_by_s`
        (monotonic). A kept connection that turns out to be broken is replaced once."""
        peer = share.peer
        reason: PeerUnavailable | None = None
        while True:
            try:
                timeout_s = pull.timeout_s()
            except PeerUnavailable as late:
                raise reason or late from None
            del pull.names[pull.num_done :]  # names of blocks that an earlier try did not bring
            limit = min(MAX_BLOCKS, len(pull.filled) - pull.num_done)
            wanted = None if keys is None else keys[pull.num_done : pull.num_done + limit]
            wait_s = min(_MAX_SERVER_WAIT_S, timeout_s)
            request = BlockRequest(
                lease_id,
                first_index + pull.num_done,
                wanted,
                limit,
                wait_s,
                share.part.first_head,
                share.part.end_head,
                share.kv_set,
                None if share.is_all else share.part.layers,
                share.part.tokens,
            )
            was_kept = False
            try:
                with peer.connection(timeout_s) as connection:
                    was_kept = connection.was_kept
                    link = peer.link(connection, self._kv, share.kv_set, pull.sink, self._before_write)
                    return link.take(connection, request, pull)
            except PeerLost as error:
                if not was_kept or reason is not None:
                    self._drop(peer)
                    raise
                reason = error
            except PeerUnavailable as refusal:
                if refusal.code != "kv_lease_unknown" or time.monotonic() > opens_by_s:
                    raise
                reason = refusal

    def _shares(self, ticket: KvTicket, deadline_s: float, kv_set: int) -> list[_RankShare]:
        """Return which rank provides which part of the blocks of a KV set, so that all of ours is covered once."""
        ours, peers, failure = self._kv.sets[kv_set].layout, [], None
        first = self._peer(ticket.address, ticket.engine_id)
        try:
            first.ensure_handshake(deadline_s - time.monotonic())
            others = [self._peer(address, ticket.engine_id) for address in first.other_ranks]
        except PeerUnavailable:
            self._drop(first)
            raise
        for peer in (first, *others):
            try:
                peer.ensure_handshake(deadline_s - time.monotonic())
                peers.append((_layout_of(peer, self._kv.layout).sets[kv_set].layout, peer))
            except PeerUnavailable as error:
                self._drop(peer)
                failure = error
        parts = cover(ours, [layout for layout, _ in peers])
        if parts is None:
            raise failure or PeerUnavailable(
                f"the ranks of {ticket.address} do not have all of {ours.whole_part}", code="kv_ranks_missing"
            )
        return [
            _RankShare(peers[i][1], part, kv_set, part.layers == peers[i][0].whole_part.layers) for i, part in parts
        ]

    def _peer(self, address: str, engine_id: str) -> RemotePeer:
        with self._lock:
            peer = self._peers.get((address, engine_id))
            if peer is None:
                peer = RemotePeer(address, engine_id, self._identity, self._settings, self._transports)
                self._peers[address, engine_id] = peer
            self._peers.move_to_end((address, engine_id))
            old = [self._peers.popitem(last=False)[1] for _ in range(len(self._peers) - _MAX_PEERS)]
        for evicted_peer in old:
            evicted_peer.close()
        return peer

    def _drop(self, peer: RemotePeer) -> None:
        with self._lock:
            if self._peers.get((peer.address, peer.engine_id)) is peer:
                del self._peers[peer.address, peer.engine_id]
        peer.close()

    def _release_loop(self) -> None:
        """Release leases, and drop peers that are gone: a link to one would keep its memory from being freed."""
        silent_until_s: dict[tuple[str, str], float] = {}  # a failing release delays the releases of other leases
        while True:
            try:
                ticket = self._releases.get(timeout=_SWEEP_INTERVAL_S)
            except queue.Empty:
                with self._lock:
                    peers = list(self._peers.values())
                for peer in peers:
                    if not peer.sweep():
                        self._drop(peer)
                continue
            if ticket is None:
                return
            now_s = time.monotonic()
            silent_until_s = {peer: until_s for peer, until_s in silent_until_s.items() if until_s > now_s}
            named = (ticket.address, ticket.engine_id)
            if named not in silent_until_s and not self._release(*named, ticket.lease_id):
                silent_until_s[named] = time.monotonic() + _RELEASE_PAUSE_S

    def _release(self, address: str, engine_id: str, lease_id: str) -> bool:
        """Release one lease. Returns False if the peer could not be reached."""
        while True:
            peer, was_kept = self._peer(address, engine_id), False
            try:
                with peer.connection(_RELEASE_TIMEOUT_S) as connection:
                    was_kept = connection.was_kept
                    connection.limit(_RELEASE_TIMEOUT_S, _RELEASE_TIMEOUT_S)
                    connection.send(FrameKind.RELEASE, lease_id.encode())
                    connection.receive(FrameKind.RELEASED)
                return True
            except PeerUnavailable as error:
                self._drop(peer)
                if not was_kept:  # otherwise the kept connection may have been broken for long, and is replaced
                    _log.event("kv_release_failed", peer=address, lease=lease_id, reason=error.message)
                    return False

    def _count(self, num_blocks: int, num_corrupt: int, part_bytes: int) -> None:
        with self._lock:
            self._stats.blocks += num_blocks
            self._stats.num_bytes += num_blocks * part_bytes
            self._stats.corrupt += num_corrupt

    def _count_pull(self, is_good: bool, started_s: float) -> None:
        with self._lock:
            self._stats.pulls += 1
            self._stats.failed_pulls += not is_good
            self._stats.seconds += time.monotonic() - started_s


def _layout_of(peer: RemotePeer, ours: KvLayout) -> KvLayout:
    layout = peer.layout
    if layout.identity != ours.identity:
        raise PeerUnavailable(f"layout: {ours.identity} here, {layout.identity} there", code="kv_identity_differs")
    return layout
