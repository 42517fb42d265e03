"""MooncakeClient: this process's client of a Mooncake store, kept alive, and called without ever waiting for it too long.

The client's calls can take a minute when a machine hangs, half a minute when a worker that owned blocks is dead, and four
seconds when the master is. So they run on threads of ours, a few of a kind, and whoever waits for one gives up in time; the
first that does, or that hears of trouble, takes the link down for everybody, and a thread asks the master until it answers.
It knows calls and codes; it refuses to know blocks.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Protocol, TypeVar

from stoker.base import log as logs
from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.mooncake.master import INSTALL_HINT
from stoker.kv.mooncake.transfer_engine import configure_environment
from stoker.kv.store.tiers.mooncake.mooncake_call_lane import CallLane

# What the client answers instead of a result.
NO_SPACE = -200
WRONG_SIZE = -600
NOT_FOUND = -704
TRANSFER_FAILED = -800
_MASTER_CODES = frozenset({-900, -901})  # no connection; no answer in time

_LOCAL_BUFFER_BYTES = 16 << 20
_FIRST_WAIT_S = 3.0  # what a worker's start waits for the store
_RETRY_S = 2.0
_TICK_S = 1.0
_DOWN_TICK_S = 0.1
_HUNG_S = 15.0
_CLOSE_S = 8.0
_POLLING_NICE = 10

log = logs.EventLog("kv.mooncake")
T = TypeVar("T")
RawClient = Any  # mooncake.store.MooncakeDistributedStore, which has no annotations


class MooncakeCallbacks(Protocol):
    """What the link's owner does on the link's own thread. All may call the client at leisure."""

    def forgotten(self, client: RawClient) -> None:
        """The master has lost names, ours among them, and takes new ones again."""

    def tick(self, client: RawClient) -> None:
        """About once a second while all is well."""


@dataclass(slots=True)
class MooncakeClientStats:
    late: int = 0
    outages: int = 0


class MooncakeClient:
    def __init__(self, settings: StoreSettings, keeper: MooncakeCallbacks) -> None:
        assert settings.mooncake_master is not None
        self.stats = MooncakeClientStats()
        self._settings = settings
        self._master = settings.mooncake_master
        self._keeper = keeper
        self._library = _load(settings)
        self.engine: Any = None  # the client's, for calls of the read lane
        self._client: RawClient | None = None
        self._down_reason: str | None = f"not yet connected to the master at {self._master}"
        self._is_told = False  # that it is down
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._connected = threading.Event()
        self._sentinel = f"stoker/alive/{token_hex(8)}"
        self._lanes = {
            "find": CallLane("find", 2),
            "read": CallLane("read", 4),
            "write": CallLane("write", 2, _POLLING_NICE),
        }
        self._thread = threading.Thread(target=self._keep, name="mooncake-keep", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._connected.wait(_FIRST_WAIT_S)

    # ---- for the tier

    def check(self) -> None:
        """TierUnavailable where it is down."""
        if self._down_reason is not None:
            raise TierUnavailable(f"Mooncake: {self._down_reason}")

    def submit(self, lane: str, work: Callable[[RawClient], T]) -> Future[T]:
        self.check()
        client = self._client
        return self._lanes[lane].submit(lambda: work(client))

    def wait(self, call: Future[T], deadline_s: float) -> T:
        """TierUnavailable when it does not end in time; the call itself goes on, with all that it was given."""
        try:
            return call.result(timeout=deadline_s)
        except TimeoutError:
            self.stats.late += 1
            self.suspect(f"a call took more than {deadline_s:.2f} s")
            raise TierUnavailable(f"Mooncake: no answer within {deadline_s:.2f} s") from None

    def suspect(self, reason: str) -> None:
        """Down until the master has answered again, which may be in a millisecond."""
        self._down_reason = reason
        self._wake.set()

    def heard(self, codes: list[int]) -> None:
        """What a call answered: TierUnavailable if it is that there is no master."""
        if not _MASTER_CODES.isdisjoint(codes):
            self.suspect(f"the master at {self._master} does not answer")
            self.check()

    def config(self, *, pinned: bool = False) -> Any:
        """How to put: near us, where we own a segment; that is never a dead worker's, and a copy in RAM."""
        config = self._library.new_config()
        config.with_hard_pin = pinned
        if self._settings.mooncake_segment_gib > 0 and self._client is not None:
            config.preferred_segment = self._client.get_hostname()
        return config

    def close(self) -> None:
        """Waits for calls on their way, but not for those that hang."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        self.suspect("closed")
        self._thread.join(_CLOSE_S)

    # ---- on its own thread

    def _keep(self) -> None:
        while not self._closing.is_set():
            if self._connect():
                break
            self._closing.wait(_RETRY_S)
        client = self._client
        is_forgotten = False
        while client is not None and not self._closing.is_set():
            is_forgotten = self._probe(client, is_forgotten)
            is_down = self._down_reason is not None
            self._wake.wait(_DOWN_TICK_S if is_down or is_forgotten else _TICK_S)
            self._wake.clear()
        self._end(client)

    def _connect(self) -> bool:
        settings, started_s = self._settings, time.monotonic()
        if not self._is_reachable(timeout_s=2.0):
            self._tell_down(
                f"no master listens at {self._master}; is mooncake_master running there, and the address right?"
            )
            return False
        hung = threading.Timer(_HUNG_S, self._tell_down, [f"set-up hangs since {_HUNG_S:.0f} s; {_CHECK_HINT}"])
        hung.daemon = True
        hung.start()
        engine, client = self._library.new_engine(), self._library.new_client()
        code = engine.initialize(settings.mooncake_host, "P2PHANDSHAKE", settings.mooncake_protocol, "")
        # With a port of its own it tries once, not twenty times over a minute and a half.
        code = code or client.setup(
            f"{settings.mooncake_host}:{engine.get_rpc_port()}",
            "P2PHANDSHAKE",
            int(settings.mooncake_segment_gib * 2**30),
            _LOCAL_BUFFER_BYTES,
            settings.mooncake_protocol,
            "",
            self._master,
            engine.get_engine(),
            enable_ssd_offload=settings.mooncake_ssd_dir is not None,
            ssd_offload_path=settings.mooncake_ssd_dir or "",
        )
        hung.cancel()
        if code != 0:
            self._tell_down(f"set-up ended with code {code} after {time.monotonic() - started_s:.1f} s; {_CHECK_HINT}")
            return False
        self._client, self.engine = client, engine
        self._put_sentinel(client)
        self._set_up()
        log.event("mooncake_connected", master=self._master, segment=client.get_hostname())
        return True

    def _probe(self, client: RawClient, is_forgotten: bool) -> bool:
        """Whether names were forgotten, and we could not yet see that new ones are taken."""
        if self._down_reason is not None and not self._is_reachable(timeout_s=0.5):
            self._tell_down(f"no master listens at {self._master}")
            return is_forgotten
        found = client.is_exist(self._sentinel)
        if found < 0:
            self._tell_down(f"the master at {self._master} does not answer (code {found})")
            return is_forgotten
        if found == 0 or is_forgotten:
            if not self._put_sentinel(client):
                # No segment is mounted, yet: what we would write has no place. There is nothing to find either.
                self._set_up()
                return True
            self._set_up()
            self._keeper.forgotten(client)
            return False
        self._set_up()
        self._keeper.tick(client)
        return False

    def _put_sentinel(self, client: RawClient) -> bool:
        """A name that is ours alone and never evicted: when it is gone, the master has lost names."""
        code: int = client.put(self._sentinel, b"alive", self.config(pinned=True))
        return code == 0

    def _set_up(self) -> None:
        if self._closing.is_set():
            return
        self._down_reason = None
        self._connected.set()
        if self._is_told:
            self._is_told = False
            log.event("mooncake_back", master=self._master)

    def _tell_down(self, reason: str) -> None:
        self._down_reason = reason
        if not self._is_told and not self._closing.is_set():
            self._is_told = True
            self.stats.outages += 1
            log.warning("mooncake_unavailable", master=self._master, reason=reason)

    def _is_reachable(self, timeout_s: float) -> bool:
        """Quick, where the client itself would try for four seconds."""
        host, _, port = self._master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=timeout_s):
                return True
        except OSError:
            return False

    def _end(self, client: RawClient | None) -> None:
        deadline = time.monotonic() + _CLOSE_S / 2
        have_ended = [lane.stop(deadline) for lane in self._lanes.values()]
        # A client with a call inside must not be taken apart: the process's end does that.
        if client is not None and all(have_ended):
            if self._is_reachable(timeout_s=0.2):
                client.remove(self._sentinel, True)
            client.close()
            self._client = self.engine = None  # what close() leaves is taken apart with the last reference, not at exit


_CHECK_HINT = (
    "check that the store's mooncake_host is this machine's address as other workers see it, that mooncake_protocol is "
    "available here, and that mooncake_segment_gib fits into RAM (MC_LOG_LEVEL=INFO shows the client's own log)"
)


@dataclass(frozen=True, slots=True)
class _Library:
    new_engine: Callable[[], Any]
    new_client: Callable[[], RawClient]
    new_config: Callable[[], Any]


def _load(settings: StoreSettings) -> _Library:
    """The client's library and the engine's."""
    further = {}
    if settings.mooncake_ssd_dir is not None:
        os.makedirs(settings.mooncake_ssd_dir, exist_ok=True)
        further = {
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(256 << 20),
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(64 << 20),
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "16",  # what does not fill a file is not written at all
        }
    configure_environment(further)
    try:
        from mooncake.engine import TransferEngine
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ImportError as missing:
        raise ConfigError(f"Mooncake's client cannot be loaded ({missing}): {INSTALL_HINT}") from None
    return _Library(TransferEngine, MooncakeDistributedStore, ReplicateConfig)
