"""MooncakeMaster: a `mooncake_master` process, the directory of a cluster's Mooncake store, for `stoker up` and for
tests.

The master holds only keys. The blocks are in the segments that workers provide. When the master ends, all keys are
lost, unless workers also keep their blocks on an SSD. Workers notice that and write the blocks that they still hold
again.

`python -m stoker.kv.mooncake.master FLAGS...` runs the program of this machine's installation.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from stoker.base.errors import ConfigError, StokerError
from stoker.base.extras import install_command

INSTALL_HINT = f"run `{install_command('mooncake')}` and, on Debian, as root, `apt-get install libibverbs1 libnuma1`"
_LIBRARIES = ("libibverbs.so.1", "libnuma.so.1")


class MasterFailed(StokerError):
    """The process did not start. The message contains the end of its log."""

    code = "mooncake_master_failed"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def program() -> Path:
    """Return the path of the program in the installed package. The script of the same name would only start it."""
    found = importlib.util.find_spec("mooncake")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "mooncake_master"
        if path.is_file():
            return path
    raise ConfigError(f"mooncake_master is not installed: {INSTALL_HINT}")


def is_installed() -> bool:
    """Return True if master and client can run here: the package and its libraries are installed. The package is not
    imported, because importing it fixes its settings."""
    if importlib.util.find_spec("mooncake") is None:
        return False
    try:
        for library in _LIBRARIES:
            ctypes.CDLL(library)
    except OSError:
        return False
    return True


class MooncakeMaster:
    """One master process. Port 0 chooses a free port, which is kept when the master is restarted.

    `lease_ms`: how long a block that was just looked up is safe from eviction. `client_ttl_s`: how long the blocks of a
    silent worker stay listed. `ssd`: workers may also keep blocks in a directory (`StoreSettings.mooncake_ssd_dir`).
    """

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
            # Timeouts for writes of workers that died. A normal write takes a second or two.
            "--put_start_discard_timeout_sec=10",
            "--put_start_release_timeout_sec=30",
            "--logtostderr=true",
            *(["--enable_offload=true", "--offload_on_evict=false"] if ssd else []),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The master's HOST:PORT, as in the workers' settings."""
        return f"{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, deadline_s: float = 15.0) -> None:
        """Start the process, unless it is running, and return when it accepts connections. Raises MasterFailed if it
        does not."""
        if self.is_running():
            return
        if self._takes_connections(timeout_s=0.5):
            # Both processes would start and share the port, and each would hold half of the keys.
            raise MasterFailed(f"another process already listens at {self.address}")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            # A new session, so that Ctrl-C does not reach it: the parent stops the workers before the master.
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
        """Return True if it runs and accepts connections."""
        return self.is_running() and self._takes_connections(timeout_s)

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, deadline_s: float = 5.0) -> None:
        """Stop the process, and kill it after the deadline."""
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


def main() -> None:
    """Become the master's process."""
    try:
        path = str(program())
    except ConfigError as error:
        sys.exit(f"stoker: {error.message}")
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
