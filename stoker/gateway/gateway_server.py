"""GatewayServer: starts, drains and stops the components of a gateway in the right order."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from dataclasses import dataclass

from stoker.base.allowance import allow_files
from stoker.base.bound_socket import shared_socket
from stoker.base.log import EventLog
from stoker.fleet.fleet import Fleet
from stoker.gateway.admission.api_keys import ApiKeys
from stoker.gateway.admission.key_watch import KeyWatch, NoKeyWatch
from stoker.gateway.admission.limit_leases import LimitLeases, NoLeases
from stoker.gateway.config import GatewayConfig
from stoker.gateway.http import Server
from stoker.gateway.insight.live_stream import LiveStream
from stoker.gateway.membership import Membership
from stoker.gateway.objects.tenant_objects import NoObjects, TenantObjects
from stoker.gateway.path.app import Gateway
from stoker.gateway.path.drain_state import GatewayState
from stoker.gateway.path.proxy import Proxy
from stoker.gateway.prefix.conversation_keys import PrefixKeyMakers
from stoker.gateway.processes import ProcessGroup
from stoker.gateway.recording import RoutingClasses
from stoker.gateway.records.meter import Meter, NoMeter
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.records.request_log import NoRequestLog, RequestLog
from stoker.gateway.records.retention import Retention
from stoker.gateway.records.tracing import Tracing
from stoker.gateway.scaling import Scaling
from stoker.gateway.store.store_threads import StoreThreads

_CLOSE_GRACE_S = 0.5  # grace period for client connections when the gateway stops
_FIRST_POLLS_S = 3.0  # the longest that the first polls of the workers may delay the start
# Threads that tokenize and hash long bodies give the interpreter lock back to the event loop after this time.
_SWITCH_INTERVAL_S = 0.0005
_OTHER_FILES = 1024  # open files besides connections in use: the ledger, KV event sockets, idle connections

log = EventLog("gateway")


@dataclass(slots=True, eq=False)
class GatewayServer:
    """A gateway that can be started and stopped. `build.py` creates it."""

    config: GatewayConfig
    server: Server
    state: GatewayState
    fleet: Fleet
    membership: Membership
    proxy: Proxy
    key_makers: PrefixKeyMakers
    group: ProcessGroup
    keys: ApiKeys
    store: StoreThreads | None
    gateway: Gateway
    objects: TenantObjects | NoObjects
    key_watch: KeyWatch | NoKeyWatch
    leases: LimitLeases | NoLeases
    retention: Retention
    scaling: Scaling
    meter: Meter | NoMeter
    metrics: GatewayMetrics
    deciding: RoutingClasses
    request_log: RequestLog | NoRequestLog
    tracing: Tracing
    live: LiveStream
    tls: ssl.SSLContext | None

    @property
    def num_running(self) -> int:
        return self.state.num_running

    @property
    def num_workers(self) -> int:
        return len(self.fleet.members())

    def models(self) -> list[str]:
        return sorted(self.fleet.models())

    async def start(self, listener: socket.socket) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # Each request has a connection to its client and one to a worker.
        needed = 2 * self.config.listen.max_connections + _OTHER_FILES
        if (allowed := allow_files(needed)) < needed:
            log.warning("few_open_files", allowed=allowed, wanted=needed, hint="raise `ulimit -Hn`")
        for spec in self.config.worker_specs():
            self.membership.add(spec)
        self.key_watch.start()
        self.retention.start()
        self.scaling.start()
        self.live.start()
        await self.membership.wait_first_polls(_FIRST_POLLS_S)
        self.objects.open(self.gateway.generate, self.gateway.run_line)
        await self.server.listen("", 0, sock=listener, ssl=self.tls)
        if self.config.process_ports:
            await self.server.listen(
                "", 0, sock=shared_socket("127.0.0.1", self.config.process_ports[self.config.process])
            )

    def announce_drain(self) -> None:
        """Leave the load balancers: `/ready` returns 503 and answers end their connections. Requests are still accepted."""
        self.state.announce_drain()
        self.objects.begin_drain()
        self.server.begin_drain()

    def begin_drain(self) -> None:
        """Refuse new requests. Running ones continue."""
        self.announce_drain()
        self.state.begin_drain()

    async def wait_idle(self) -> None:
        await self.state.wait_idle()

    async def close(self) -> None:
        """Stop now. Running requests are aborted; pending usage rows and trace spans are written."""
        await self.scaling.close()
        await self.server.close(_CLOSE_GRACE_S)
        await self.objects.close()
        await self.membership.close()
        await self.key_watch.close()
        await self.retention.close()
        await self.live.close()
        await self.proxy.close()
        await self.leases.close()
        self.group.close()
        self.key_makers.close()
        await asyncio.to_thread(self.tracing.close)
        await asyncio.to_thread(self.request_log.close)
        await asyncio.to_thread(self.deciding.close)
        await asyncio.to_thread(self.meter.close)
        if self.store is not None:
            await asyncio.to_thread(self.store.close)
            await asyncio.to_thread(self.store.store.close)
