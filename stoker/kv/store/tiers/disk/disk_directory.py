"""The disk tier's directory as a whole: whose key it is of, what killed writers left in it, and how long a disk that fails is left
alone."""

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
_PAUSE_S = (1.0, 60.0)  # the first and the longest
_ONLY_READ = (ENOSPC, EDQUOT, EROFS)  # kernels make a file system read-only when its disk fails


class DiskBackoff:
    """Of something that fails: each time it fails again, twice as long."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._next_s = _PAUSE_S[0]

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def begin(self) -> float:
        pause_s = self._next_s
        self._until_s = time.monotonic() + pause_s
        self._next_s = min(2 * pause_s, _PAUSE_S[1])
        return pause_s

    def end(self) -> None:
        self._next_s = _PAUSE_S[0]


class DiskHealth:
    """How the disk has done lately. For a while, one that takes nothing is not written to, and one that fails again and again
    not asked at all; nor is one that hangs, until its call has come back."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._in_a_row = 0
        self.num_errors = 0
        self.full, self.resting = DiskBackoff(), DiskBackoff()
        self._hanging: Future[Any] | None = None  # the call that was last given up
        self._hangs_since_s = 0.0

    @property
    def is_paused(self) -> bool:
        return self.resting.left_s > 0 or self._is_hanging

    @property
    def is_writable(self) -> bool:
        return not self.is_paused and not self.full.left_s

    @property
    def _is_hanging(self) -> bool:
        return self._hanging is not None and not self._hanging.done()

    def failed(self, what: str, error: OSError) -> None:
        with self._lock:
            self.num_errors += 1
            if error.errno in _ONLY_READ:
                if not self.full.left_s:
                    pause_s, path = self.full.begin(), str(self._root)
                    log.warning("disk_takes_nothing", what=what, error=error.strerror, pause_s=pause_s, path=path)
                return
            self._in_a_row += 1
            is_hopeless = self._in_a_row >= _ERRORS_IN_A_ROW and not self.resting.left_s
            pause_s = self.resting.begin() if is_hopeless else 0.0
        log.warning("disk_error", what=what, error=error.strerror, in_a_row=self._in_a_row, pause_s=pause_s)

    def worked(self, has_room: bool = False) -> None:
        with self._lock:
            self._in_a_row = 0
            self.resting.end()
            if has_room:
                self.full.end()

    def hangs(self, call: Future[Any], waited_s: float) -> None:
        """The call was begun and has not come back for so long."""
        with self._lock:
            self.num_errors += 1
            self._hanging, self._hangs_since_s = call, time.monotonic() - waited_s
        log.warning("disk_hangs", path=str(self._root), waited_s=waited_s)
        call.add_done_callback(lambda _: log.event("disk_answers_again", path=str(self._root)))

    def check_answers(self) -> None:
        if self._is_hanging:
            raise TierUnavailable(
                f"{self._root} has not answered for {time.monotonic() - self._hangs_since_s:.1f} s; it is asked again when "
                "its call has come back"
            )

    def check(self) -> None:
        self.check_answers()
        if left_s := self.resting.left_s:
            raise TierUnavailable(f"{self._root} failed {_ERRORS_IN_A_ROW} times in a row; it rests for {left_s:.1f} s")


def check_marker(root: Path, cipher: Cipher | None) -> None:
    """A directory is of one key, or of none, for good: the first who uses it says which."""
    path = root / "store.json"
    if not path.exists():
        mine = root / f"store.json.{os.getpid()}.{os.urandom(4).hex()}"
        mine.write_text(json.dumps({"proof": cipher.proof() if cipher else None}))
        with suppress(FileExistsError):
            os.link(mine, path)  # unlike a rename, it fails if another was first
        mine.unlink()
    try:
        proof = json.loads(path.read_text())["proof"]
        is_right = cipher.proves(proof) if cipher and proof else not cipher and not proof
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged: remove all of {root}, or take another store.disk_dir") from None
    if is_right:
        return
    if proof is None:
        raise ConfigError(
            f"{root} holds blocks that are not encrypted: with store.disk_key_file, take another directory"
        )
    if cipher is None:
        raise ConfigError(f"{root} is encrypted: it needs its store.disk_key_file")
    raise ConfigError(f"{root} is encrypted with another key than the one of store.disk_key_file")


def remove_abandoned_files(tmp: Path) -> None:
    """What writers that were killed have left."""
    for path in tmp.iterdir():
        pid, _, rest = path.name.partition("-")
        started = rest.partition("-")[0]
        with suppress(FileNotFoundError):
            is_ours = pid.isdigit() and started.isdigit() and is_alive(int(pid), int(started))
            if not is_ours or time.time() - path.stat().st_mtime > _OLD_TMP_S:
                path.unlink()
