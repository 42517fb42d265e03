"""A PostgreSQL server of our own in a temporary folder, to be started, killed and filled up at will.

It uses the installed server: on Debian, as root, `apt-get install postgresql`. A server refuses to run as root, so for root it
runs as the user `postgres`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_WAIT_S = 30.0


def installed() -> Path | None:
    """Return the folder of the server's programs, or None if no server is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    if found:
        return found[-1].parent
    return None if on_path is None else Path(on_path).resolve().parent


class PostgresServer:
    """A server with one empty database, reached at `url`."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._user = "postgres" if os.getuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-postgres-"))
        if self._user is not None:
            entry = pwd.getpwnam(self._user)
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
        with socket.create_server(("127.0.0.1", 0)) as one:
            self.port = one.getsockname()[1]
        data = self.folder / "data"
        self._run("initdb", "-D", str(data), "-U", "stoker", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return self.database("postgres")

    def database(self, name: str) -> str:
        return f"postgresql://stoker@127.0.0.1:{self.port}/{name}"

    def create_database(self, name: str) -> str:
        """Create a database and return its URL."""
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "stoker", "-E", "UTF8", name)
        return self.database(name)

    def start(self) -> None:
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={self.folder}"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, user=self._user, cwd=self.folder)
        deadline_s = time.monotonic() + _WAIT_S
        ready = [str(self._programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise RuntimeError(f"PostgreSQL did not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT disconnects all clients first, SIGQUIT ends at once as a crash does."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(_WAIT_S)
            self._process = None

    def close(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, user=self._user, cwd=self.folder, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")
