"""The state of the disk tier's directory as a whole: its encryption key, files left by killed writers, and errors of
the disk."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from errno import EDQUOT, ENOSPC, EROFS
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.log import EventLog
from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.tiers.disk.disk_encryption import Cipher
from stoker.kv.store.tiers.process_liveness import is_alive

log = EventLog("kv.disk")

_ERRORS_IN_A_ROW = 3
_OLD_TMP_S = 600.0
_BACKOFF_S = (1.0, 60.0)  # first and longest pause
_NOT_WRITABLE = (ENOSPC, EDQUOT, EROFS)  # the kernel remounts a file system read-only when its disk fails


class DiskBackoff:
    """A pause after an error, which doubles with each further error."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._next_s = _BACKOFF_S[0]

    @property
    def left_s(self) -> float:
        """The rest of the current pause, 0 if there is none."""
        return max(0.0, self._until_s - time.monotonic())

    def begin(self) -> float:
        """Begin a pause and return its length."""
        pause_s = self._next_s
        self._until_s = time.monotonic() + pause_s
        self._next_s = min(2 * pause_s, _BACKOFF_S[1])
        return pause_s

    def reset(self) -> None:
        """Let the next pause be the first one again."""
        self._next_s = _BACKOFF_S[0]


class DiskHealth:
    """The recent behaviour of the disk. A disk that is full or read-only is not written for a while. A disk that fails
    several times in a row is not used for a while. A disk that hangs is not used until the hanging call returns."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._in_a_row = 0
        self.num_errors = 0
        self.full_backoff, self.error_backoff = DiskBackoff(), DiskBackoff()
        self._hanging: Future[Any] | None = None  # the last call that was abandoned
        self._hangs_since_s = 0.0

    @property
    def is_paused(self) -> bool:
        """True if the disk is not used at the moment."""
        return self.error_backoff.left_s > 0 or self._is_hanging

    @property
    def is_writable(self) -> bool:
        """True if blocks may be written at the moment."""
        return not self.is_paused and not self.full_backoff.left_s

    @property
    def _is_hanging(self) -> bool:
        return self._hanging is not None and not self._hanging.done()

    def failed(self, what: str, error: OSError) -> None:
        """Record an error, and begin a pause if necessary."""
        with self._lock:
            self.num_errors += 1
            if error.errno in _NOT_WRITABLE:
                if not self.full_backoff.left_s:
                    pause_s, path = self.full_backoff.begin(), str(self._root)
                    log.warning("disk_not_writable", what=what, error=error.strerror, pause_s=pause_s, path=path)
                return
            self._in_a_row += 1
            needs_pause = self._in_a_row >= _ERRORS_IN_A_ROW and not self.error_backoff.left_s
            pause_s = self.error_backoff.begin() if needs_pause else 0.0
        log.warning("disk_error", what=what, error=error.strerror, in_a_row=self._in_a_row, pause_s=pause_s)

    def worked(self, is_write: bool = False) -> None:
        """Record a successful call. `is_write`: it was a write."""
        with self._lock:
            self._in_a_row = 0
            self.error_backoff.reset()
            if is_write:
                self.full_backoff.reset()

    def hangs(self, call: Future[Any], waited_s: float) -> None:
        """Record a call that has not returned for `waited_s`."""
        with self._lock:
            self.num_errors += 1
            self._hanging, self._hangs_since_s = call, time.monotonic() - waited_s
        log.warning("disk_hangs", path=str(self._root), waited_s=waited_s)
        call.add_done_callback(lambda _: log.event("disk_answers_again", path=str(self._root)))

    def check_answers(self) -> None:
        """Raise TierUnavailable while a call hangs."""
        if self._is_hanging:
            raise TierUnavailable(
                f"{self._root} has not answered for {time.monotonic() - self._hangs_since_s:.1f} s; it is used again when "
                "the hanging call returns"
            )

    def check(self) -> None:
        """Raise TierUnavailable while the disk is not used."""
        self.check_answers()
        if left_s := self.error_backoff.left_s:
            raise TierUnavailable(
                f"{self._root} failed {_ERRORS_IN_A_ROW} times in a row; the next try is in {left_s:.1f} s"
            )


def check_marker(root: Path, cipher: Cipher | None) -> None:
    """Check that the directory belongs to this encryption key, or to none. The first process that uses a directory
    decides which."""
    path = root / "store.json"
    if not path.exists():
        temporary = root / f"store.json.{os.getpid()}.{os.urandom(4).hex()}"
        temporary.write_text(json.dumps({"proof": cipher.proof() if cipher else None}))
        with suppress(FileExistsError):
            os.link(temporary, path)  # unlike a rename, a link fails if another process was first
        temporary.unlink()
    try:
        proof = json.loads(path.read_text())["proof"]
        is_right_key = cipher.proves(proof) if cipher and proof else not cipher and not proof
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} is damaged: delete {root}, or choose another store.disk_dir") from None
    if is_right_key:
        return
    if proof is None:
        raise ConfigError(
            f"{root} holds blocks that are not encrypted: choose another store.disk_dir for store.disk_key_file"
        )
    if cipher is None:
        raise ConfigError(f"{root} is encrypted: set store.disk_key_file to its key")
    raise ConfigError(
        f"{root} is encrypted with another key than store.disk_key_file: use its key, or choose another store.disk_dir"
    )


def remove_abandoned_files(tmp: Path) -> None:
    """Delete the temporary files of writers that were killed."""
    for path in tmp.iterdir():
        pid, _, rest = path.name.partition("-")
        started = rest.partition("-")[0]
        with suppress(FileNotFoundError):
            is_in_use = pid.isdigit() and started.isdigit() and is_alive(int(pid), int(started))
            if not is_in_use or time.time() - path.stat().st_mtime > _OLD_TMP_S:
                path.unlink()
