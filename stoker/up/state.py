"""The run folder of a fleet. It holds the fleet's secret, its admin token and state.json, which `stoker status` reads.

The folder is named after the gateway's port. The fleet holds a lock file beside it while it runs, and the kernel frees the lock
when the process ends. So a process that gets the lock knows that the fleet has ended, even if it was killed.
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
from stoker.proto.fleet_state import FleetState, decode_fleet_state, encode_fleet_state

_STATE = "state.json"


def default_state_dir(environ: Mapping[str, str]) -> Path:
    if named := environ.get("XDG_STATE_HOME"):
        return Path(named).expanduser() / "stoker"
    return Path(environ.get("HOME", "~")).expanduser() / ".local" / "state" / "stoker"


class RunDir:
    """The run folder of this process's fleet, with its lock held."""

    def __init__(self, path: Path, lock: IO[bytes], left: FleetState | None = None) -> None:
        self.path = path
        self.left = left  # the last state of a fleet that was killed
        self._lock = lock

    def write(self, name: str, text: str) -> Path:
        """Write a file that only this user can read."""
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
        """Replace state.json atomically."""
        new = self.path / f".{_STATE}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(encode_fleet_state(state))
        new.replace(self.path / _STATE)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.with_suffix(".lock").unlink(missing_ok=True)
        self._lock.close()


def open_run_dir(fleets_dir: Path, port: int) -> RunDir:
    """Lock and create the run folder for a gateway port. Raise ConfigError if a fleet on this port is running."""
    path = fleets_dir / str(port)
    try:
        fleets_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        if lock is None:
            state = _read(path)
            owner = f" (process {state.pid})" if state else ""
            raise ConfigError(
                f"a fleet is already running on port {port}{owner}: see `stoker status`, or choose another --port"
            )
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise _unusable(path, error) from error
    return RunDir(path, lock)


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{error.filename or path}: {error.strerror}; choose another folder (XDG_STATE_HOME)")


def living_fleets(fleets_dir: Path) -> Iterator[FleetState]:
    """Return the states of all running fleets."""
    for path in _run_dirs(fleets_dir):
        lock = _lock(path)
        if lock is not None:
            lock.close()
            continue
        state = _read(path)
        if state is not None:
            yield state


def abandoned_fleets(fleets_dir: Path) -> Iterator[RunDir]:
    """Lock and return the run folders of fleets that were killed. The caller must clean up and remove them."""
    for path in _run_dirs(fleets_dir):
        lock = _lock(path)
        if lock is not None:
            yield RunDir(path, lock, _read(path))


def _run_dirs(fleets_dir: Path) -> list[Path]:
    try:
        return [path.parent for path in sorted(fleets_dir.glob(f"*/{_STATE}"))]
    except OSError as error:  # for example a home folder of another user
        raise _unusable(fleets_dir, error) from error


def _lock(path: Path) -> IO[bytes] | None:
    """Return the held lock file, or None if another process holds it."""
    while True:
        lock = path.with_suffix(".lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path.with_suffix(".lock")):
                return lock
        except BlockingIOError:
            lock.close()
            return None
        lock.close()  # its last holder removed the file meanwhile: try again


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _read(path: Path) -> FleetState | None:
    try:
        return decode_fleet_state((path / _STATE).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
