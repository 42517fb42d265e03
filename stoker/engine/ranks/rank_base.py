"""RankBase: where a rank runs. One on the machine of rank 0 was started by it, and reads plans from shared memory. One on another
node was started by that node's supervisor, and gets everything from the head over TCP."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, Protocol

from stoker.base.config import EngineSettings
from stoker.base.errors import StokerError
from stoker.engine.ranks.head_connection import connect_head
from stoker.engine.ranks.node_hello import NodeHello
from stoker.parallel.plan_stream import OrderReader, PlanStreamReader
from stoker.parallel.plan_transport import PlanReader
from stoker.parallel.rank_link import EngineStopped, Kind, LinkEnd, LinkMessage, RankLink
from stoker.parallel.ring import RingReader

_LAST_WORDS_S = 1.0  # for the reason of rank 0's end to be read, after a connection to it has failed


class RankBase(Protocol):
    """What a rank needs of the place where it runs."""

    link: RankLink
    """The connection to rank 0."""

    interface: str | None
    """This machine's address for connections between ranks. None: the address of rank 0."""

    def order(self) -> LinkMessage:
        """Wait for a message of rank 0. Raises RankDismissed if it ends this rank."""

    def start_plans(self) -> PlanReader:
        """Return the plans of rank 0, which has sent START."""

    def end_silently(self) -> NoReturn:
        """End this process, because rank 0 is gone."""


class LocalBase:
    """A rank on the machine of rank 0. `ring` are the file descriptors of the ring, and this rank's place among its readers."""

    def __init__(self, starter: RankLink, ring: Sequence[int]) -> None:
        self.interface: str | None = None
        self.link, self._ring = starter, ring
        starter.send(LinkMessage(Kind.HELLO))

    def order(self) -> LinkMessage:
        return self.link.receive_order()

    def start_plans(self) -> PlanReader:
        memory, event, index, num_readers = self._ring
        return RingReader(memory, event, index, num_readers)

    def end_silently(self) -> NoReturn:
        os._exit(1)


class NodeBase:
    """A rank on another node. Its supervisor, `starter`, learns when it serves, and why it ends."""

    def __init__(self, starter: RankLink, settings: EngineSettings, rank: int, facts: Mapping[str, str]) -> None:
        """Connect to the head. Raises ConfigError if that fails, RankDismissed later if this rank does not fit."""
        self._starter = starter
        nodes = settings.nodes
        met = connect_head(settings, NodeHello(nodes.rank, nodes.count, rank, dict(facts)))
        self.link = met.link
        self.interface: str | None = met.interface
        # Peers of other engines reach this rank's KV on the network of the head.
        self.settings = replace(
            settings,
            handoff=replace(settings.handoff, host=met.interface),
            store=replace(settings.store, mooncake_host=met.interface),
        )
        self._orders = OrderReader(self.link, self._end)

    def order(self) -> LinkMessage:
        message = self._orders.next()
        assert message is not None  # there is no timeout
        return message

    def start_plans(self) -> PlanReader:
        self._starter.send(LinkMessage(Kind.START))
        return PlanStreamReader(self._orders)

    def end_silently(self) -> NoReturn:
        time.sleep(_LAST_WORDS_S)  # the reader of the orders ends this process, with the reason
        os._exit(1)

    def _end(self, error: StokerError) -> None:
        """End this process at once: its main thread may wait for ranks that are gone."""
        if isinstance(error, EngineStopped):
            with suppress(LinkEnd):
                self._starter.send(LinkMessage(Kind.BYE))
        else:
            gone = "the connection to the head ended: " if isinstance(error, LinkEnd) else ""
            tell_end([self._starter], gone + error.message)
        sys.stderr.flush()
        os._exit(1)


def tell_end(links: Iterable[RankLink], reason: str) -> None:
    """Tell why this rank ends."""
    for link in links:
        with suppress(LinkEnd):
            link.send(LinkMessage(Kind.FAILED, text=reason))
