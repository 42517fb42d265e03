"""What a running fleet leaves for others to find: a folder of its own with a secret, a token and state.json.

One fleet has one place, named after its gateway's port, and holds the lock beside it for as long as it lives: whoever can
take the lock knows that nobody lives there, however the fleet ended.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from stoker.base.errors import ConfigError

_STATE = "state.json"


def default_state_dir(environ: Mapping[str, str]) -> Path:
    if named := environ.get("XDG_STATE_HOME"):
        return Path(named).expanduser() / "stoker"
    return Path(environ.get("HOME", "~")).expanduser() / ".local" / "state" / "stoker"


# What another version of stoker wrote down, or left behind, is read as far as it goes: hence the defaults.
class PartInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str = ""
    role: str = ""
    address: str = ""
    phase: str = ""
    pid: int | None = None
    restarts: int = 0
    last_code: int | None = None
    log: str = ""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    started_at: float  # seconds since 1970
    gateway_url: str
    admin_token_file: str = ""
    store_name: str | None = None
    log_dir: str = ""
    models: list[str] = []
    parts: list[PartInfo] = []


class RunDir:
    """A place that is ours."""

    def __init__(self, path: Path, lock: IO[bytes], left: FleetState | None = None) -> None:
        self.path = path
        self.left = left  # by a fleet that did not end in order
        self._lock = lock

    def write(self, name: str, text: str) -> Path:
        """For us and our parts alone."""
        path = self.path / name
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise _unusable(path, error) from error
        return path

    def write_secret(self, name: str) -> Path:
        return self.write(name, secrets.token_urlsafe(32))

    def write_state(self, state: FleetState) -> None:
        """Whole or not at all."""
        new = self.path / f".{_STATE}"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        new.replace(self.path / _STATE)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.with_suffix(".lock").unlink(missing_ok=True)
        self._lock.close()


def open_run_dir(fleets_dir: Path, port: int) -> RunDir:
    path = fleets_dir / str(port)
    try:
        fleets_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        if lock is None:
            state = _read(path)
            who = f", process {state.pid}" if state else ""
            raise ConfigError(
                f"a fleet runs already on port {port}{who}: see `stoker status`, or choose another --port"
            )
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise _unusable(path, error) from error
    return RunDir(path, lock)


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{error.filename or path}: {error.strerror}; choose another folder (XDG_STATE_HOME)")


def living_fleets(fleets_dir: Path) -> Iterator[FleetState]:
    for place in _places(fleets_dir):
        lock = _lock(place)
        if lock is not None:
            lock.close()
            continue
        state = _read(place)
        if state is not None:
            yield state


def abandoned_fleets(fleets_dir: Path) -> Iterator[RunDir]:
    """Of fleets that were killed. Whoever gets one should tidy up and remove it."""
    for place in _places(fleets_dir):
        lock = _lock(place)
        if lock is not None:
            yield RunDir(place, lock, _read(place))


def _places(fleets_dir: Path) -> list[Path]:
    try:
        return [path.parent for path in sorted(fleets_dir.glob(f"*/{_STATE}"))]
    except OSError as error:  # a home that is somebody else's
        raise _unusable(fleets_dir, error) from error


def _lock(path: Path) -> IO[bytes] | None:
    """None: somebody has it."""
    while True:
        lock = path.with_suffix(".lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path.with_suffix(".lock")):
                return lock
        except BlockingIOError:
            lock.close()
            return None
        lock.close()  # its last owner removed it while we took it


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _read(path: Path) -> FleetState | None:
    try:
        return msgspec.json.decode((path / _STATE).read_bytes(), type=FleetState)
    except (OSError, msgspec.MsgspecError):
        return None
