"""MooncakeClient: this process's client of a Mooncake store, kept connected, with a deadline for every call.

A call of the client library can take a minute if a machine hangs, half a minute if the worker that owned the blocks is
dead, and four seconds if the master is dead. So calls run on a few threads per kind, and callers stop waiting in time.
The first caller that gives up or gets an error marks the client as down for all callers, and a thread polls the master
until it answers. This module knows calls and error codes, but not blocks.
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

# Error codes of the client library.
NO_SPACE = -200
WRONG_SIZE = -600
NOT_FOUND = -704
TRANSFER_FAILED = -800
_MASTER_CODES = frozenset({-900, -901})  # no connection; no answer in time

_LOCAL_BUFFER_BYTES = 16 << 20
_FIRST_WAIT_S = 3.0  # how long a worker's start waits for the store
_RETRY_S = 2.0
_TICK_S = 1.0
_DOWN_TICK_S = 0.1
_HUNG_S = 15.0
_CLOSE_S = 8.0
_POLLING_NICE = 10

log = logs.EventLog("kv.mooncake")
T = TypeVar("T")
RawClient = Any  # mooncake.store.MooncakeDistributedStore, which has no type annotations


class MooncakeCallbacks(Protocol):
    """What the tier does on the client's maintenance thread. Both methods may call the client and may block."""

    def forgotten(self, client: RawClient) -> None:
        """The master has lost its keys, ours among them, and accepts new ones again."""

    def tick(self, client: RawClient) -> None:
        """Called about once a second while the client is connected."""


@dataclass(slots=True)
class MooncakeClientStats:
    """Counters since the start."""

    late: int = 0
    outages: int = 0


class MooncakeClient:
    """Connects to the master, and runs calls in three lanes: find, read and write."""

    def __init__(self, settings: StoreSettings, callbacks: MooncakeCallbacks) -> None:
        assert settings.mooncake_master is not None
        self.stats = MooncakeClientStats()
        self._settings = settings
        self._master = settings.mooncake_master
        self._callbacks = callbacks
        self._library = _load(settings)
        self.engine: Any = None  # the Transfer Engine, for calls of the read lane
        self._client: RawClient | None = None
        self._down_reason: str | None = f"not yet connected to the master at {self._master}"
        self._is_logged = False  # whether the outage was logged
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._connected = threading.Event()
        self._sentinel = f"stoker/alive/{token_hex(8)}"
        self._lanes = {
            "find": CallLane("find", 2),
            "read": CallLane("read", 4),
            "write": CallLane("write", 2, _POLLING_NICE),
        }
        self._thread = threading.Thread(target=self._maintain, name="mooncake-maintain", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._connected.wait(_FIRST_WAIT_S)

    # ---- called by the tier

    def check(self) -> None:
        """Raise TierUnavailable if the client is down."""
        if self._down_reason is not None:
            raise TierUnavailable(f"Mooncake: {self._down_reason}")

    def submit(self, lane: str, work: Callable[[RawClient], T]) -> Future[T]:
        """Run `work` in a lane."""
        self.check()
        client = self._client
        return self._lanes[lane].submit(lambda: work(client))

    def wait(self, call: Future[T], deadline_s: float) -> T:
        """Wait for a call. Raises TierUnavailable at the deadline; the call itself continues and keeps its arguments
        alive."""
        try:
            return call.result(timeout=deadline_s)
        except TimeoutError:
            self.stats.late += 1
            self.suspect(f"a call took more than {deadline_s:.2f} s")
            raise TierUnavailable(f"Mooncake: no answer within {deadline_s:.2f} s") from None

    def suspect(self, reason: str) -> None:
        """Mark the client as down until the master has answered again, which may take a millisecond."""
        self._down_reason = reason
        self._wake.set()

    def check_codes(self, codes: list[int]) -> None:
        """Check the codes that a call returned. Raises TierUnavailable if the master does not answer."""
        if not _MASTER_CODES.isdisjoint(codes):
            self.suspect(f"the master at {self._master} does not answer")
            self.check()

    def config(self, *, pinned: bool = False) -> Any:
        """Return the settings for a put. It prefers this worker's own segment, which is never on a dead worker, with
        one copy in RAM."""
        config = self._library.new_config()
        config.with_hard_pin = pinned
        if self._settings.mooncake_segment_gib > 0 and self._client is not None:
            config.preferred_segment = self._client.get_hostname()
        return config

    def close(self) -> None:
        """Close the client. Waits for running calls, but not for those that hang."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        self.suspect("closed")
        self._thread.join(_CLOSE_S)

    # ---- on the maintenance thread

    def _maintain(self) -> None:
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
            self._log_down(
                f"no master listens at {self._master}; check that mooncake_master runs there and that the address is right"
            )
            return False
        hung = threading.Timer(_HUNG_S, self._log_down, [f"set-up has not returned for {_HUNG_S:.0f} s; {_CHECK_HINT}"])
        hung.daemon = True
        hung.start()
        engine, client = self._library.new_engine(), self._library.new_client()
        code = engine.initialize(settings.mooncake_host, "P2PHANDSHAKE", settings.mooncake_protocol, "")
        # With an explicit port it tries once, instead of twenty times over a minute and a half.
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
            self._log_down(f"set-up ended with code {code} after {time.monotonic() - started_s:.1f} s; {_CHECK_HINT}")
            return False
        self._client, self.engine = client, engine
        self._put_sentinel(client)
        self._mark_up()
        log.event("mooncake_connected", master=self._master, segment=client.get_hostname())
        return True

    def _probe(self, client: RawClient, is_forgotten: bool) -> bool:
        """Ask the master whether it still lists our sentinel. Returns True while its keys are lost and it does not
        accept new ones yet."""
        if self._down_reason is not None and not self._is_reachable(timeout_s=0.5):
            self._log_down(f"no master listens at {self._master}")
            return is_forgotten
        found = client.is_exist(self._sentinel)
        if found < 0:
            self._log_down(f"the master at {self._master} does not answer (code {found})")
            return is_forgotten
        if found == 0 or is_forgotten:
            if not self._put_sentinel(client):
                # No segment is mounted yet, so nothing can be written or found.
                self._mark_up()
                return True
            self._mark_up()
            self._callbacks.forgotten(client)
            return False
        self._mark_up()
        self._callbacks.tick(client)
        return False

    def _put_sentinel(self, client: RawClient) -> bool:
        """Put a key that only this client uses and that is never evicted. If it is gone, the master has lost its keys."""
        code: int = client.put(self._sentinel, b"alive", self.config(pinned=True))
        return code == 0

    def _mark_up(self) -> None:
        if self._closing.is_set():
            return
        self._down_reason = None
        self._connected.set()
        if self._is_logged:
            self._is_logged = False
            log.event("mooncake_back", master=self._master)

    def _log_down(self, reason: str) -> None:
        self._down_reason = reason
        if not self._is_logged and not self._closing.is_set():
            self._is_logged = True
            self.stats.outages += 1
            log.warning("mooncake_unavailable", master=self._master, reason=reason)

    def _is_reachable(self, timeout_s: float) -> bool:
        """Return True if the master's port accepts connections. The client library would retry for four seconds."""
        host, _, port = self._master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=timeout_s):
                return True
        except OSError:
            return False

    def _end(self, client: RawClient | None) -> None:
        deadline = time.monotonic() + _CLOSE_S / 2
        have_ended = [lane.stop(deadline) for lane in self._lanes.values()]
        # A client with a running call must not be closed. The end of the process does that.
        if client is not None and all(have_ended):
            if self._is_reachable(timeout_s=0.2):
                client.remove(self._sentinel, True)
            client.close()
            self._client = self.engine = None  # the rest is released with the last reference, not at exit


_CHECK_HINT = (
    "check that store.mooncake_host is an address of this machine that other workers can reach, that "
    "store.mooncake_protocol is available here, and that store.mooncake_segment_gib fits into RAM (MC_LOG_LEVEL=INFO shows "
    "the client's own log)"
)


@dataclass(frozen=True, slots=True)
class _Library:
    new_engine: Callable[[], Any]
    new_client: Callable[[], RawClient]
    new_config: Callable[[], Any]


def _load(settings: StoreSettings) -> _Library:
    """Import the client library and the Transfer Engine."""
    extra = {}
    if settings.mooncake_ssd_dir is not None:
        os.makedirs(settings.mooncake_ssd_dir, exist_ok=True)
        extra = {
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(256 << 20),
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(64 << 20),
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "16",  # blocks that do not fill a file are not written at all
        }
    configure_environment(extra)
    try:
        from mooncake.engine import TransferEngine
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ImportError as error:
        raise ConfigError(f"the Mooncake client cannot be imported ({error}): {INSTALL_HINT}") from None
    return _Library(TransferEngine, MooncakeDistributedStore, ReplicateConfig)
