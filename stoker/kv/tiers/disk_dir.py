"""The disk tier's directory as a whole: whose key it is of, what killed writers left in it, and how long a disk that fails is left
alone."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.kv.tiers.disk_crypt import Cipher
from stoker.kv.tiers.processes import is_alive

_OLD_TMP_S = 600.0
_PAUSE_S = (1.0, 60.0)  # the first and the longest


class Pause:
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


def remove_left_behind(tmp: Path) -> None:
    """What writers that were killed have left."""
    for path in tmp.iterdir():
        pid, _, rest = path.name.partition("-")
        started = rest.partition("-")[0]
        with suppress(FileNotFoundError):
            is_ours = pid.isdigit() and started.isdigit() and is_alive(int(pid), int(started))
            if not is_ours or time.time() - path.stat().st_mtime > _OLD_TMP_S:
                path.unlink()
