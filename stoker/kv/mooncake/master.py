"""A `mooncake_master` process: the directory of a cluster's Mooncake store, for `stoker up` and for tests.

It holds names alone, no bytes: those lie in the segments that workers give. When it ends, every name is forgotten, unless
workers keep their blocks on an SSD too; workers find out and offer anew what they still hold.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from stoker.base.errors import ConfigError, StokerError

INSTALL_HINT = (
    "install it with `pip install stoker[mooncake]`, and on Debian, as root: `apt-get install libibverbs1 libnuma1`"
)
_LIBRARIES = ("libibverbs.so.1", "libnuma.so.1")


class MasterFailed(StokerError):
    """The process did not come up; the message has the end of its log."""

    code = "mooncake_master_failed"


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def program() -> Path:
    """The program as it lies in the installed package; the script of the same name would only start it."""
    found = importlib.util.find_spec("mooncake")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "mooncake_master"
        if path.is_file():
            return path
    raise ConfigError(f"mooncake_master is not installed: {INSTALL_HINT}")


def is_installed() -> bool:
    """Whether master and client can run here: the package is there, and the libraries that it needs. It is not loaded:
    loading it fixes its settings."""
    if importlib.util.find_spec("mooncake") is None:
        return False
    try:
        for library in _LIBRARIES:
            ctypes.CDLL(library)
    except OSError:
        return False
    return True


class MooncakeMaster:
    """One master. A port of 0 takes a free one, and keeps it when the master is started again after its death.

    `lease_ms`: how long a block that was just asked for is safe from eviction. `client_ttl_s`: how long a silent worker's
    blocks stay listed. `ssd`: workers may keep blocks in a directory too (`StoreSettings.mooncake_ssd_dir`)."""

    def __init__(
        self,
        log_path: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        metrics_port: int = 0,
        lease_ms: int = 2000,
        client_ttl_s: int = 10,
        ssd: bool = False,
        more_arguments: Sequence[str] = (),
    ) -> None:
        self._host = host
        self._port = port or free_port(host)
        self._metrics_port = metrics_port or free_port(host)
        self._log_path = log_path
        self._command = [
            str(program()),
            f"--rpc_address={host}",
            f"--rpc_port={self._port}",
            f"--metrics_host={host}",
            f"--metrics_port={self._metrics_port}",
            f"--default_kv_lease_ttl={lease_ms}",
            f"--client_ttl={client_ttl_s}",
            # What a worker had begun to write when it died: ours take a second or two.
            "--put_start_discard_timeout_sec=10",
            "--put_start_release_timeout_sec=30",
            "--logtostderr=true",
            *(["--enable_offload=true", "--offload_on_evict=false"] if ssd else []),
            *more_arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port, as workers want it."""
        return f"{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, deadline_s: float = 15.0) -> None:
        """Returns when it takes connections; MasterFailed otherwise. One that died before is started anew."""
        if self.is_running():
            return
        if self._takes_connections(timeout_s=0.5):
            # It would start all the same, and the two would share the port, each with half of the names.
            raise MasterFailed(f"somebody else listens at {self.address} already")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            # A session of its own: Ctrl-C is for whoever started us, who stops the workers before their master.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        give_up = time.monotonic() + deadline_s
        while not self.is_healthy():
            if not self.is_running() or time.monotonic() > give_up:
                state = "does not answer" if self.is_running() else f"ended with {self._process.returncode}"
                self.stop()
                raise MasterFailed(
                    f"mooncake_master at {self.address} {state}; {self._log_path} ends: {self._log_end()}"
                )
            time.sleep(0.02)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_healthy(self, timeout_s: float = 0.5) -> bool:
        """Whether it runs and takes connections."""
        return self.is_running() and self._takes_connections(timeout_s)

    def kill(self) -> None:
        """At once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, deadline_s: float = 5.0) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> MooncakeMaster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _takes_connections(self, timeout_s: float) -> bool:
        try:
            with socket.create_connection((self._host, self._port), timeout=timeout_s):
                return True
        except OSError:
            return False

    def _log_end(self) -> str:
        with self._log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - 1000))
            return log.read().decode(errors="replace").strip() or "(empty)"
