"""What this machine has that a fleet is cut to: RAM, shared memory, disk, cards. Looked at once, at start."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from stoker.base.allowance import available_ram

GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
_CARDS_S = 20.0


@dataclass(frozen=True, slots=True)
class Machine:
    ram_bytes: int  # free now, for us
    shared_bytes: int  # free in the file system of shared memory: containers often have little
    disk_bytes: int  # free where the cache folder lies
    card_bytes: tuple[int, ...] = ()  # free on each card

    @staticmethod
    def look(cache_dir: Path) -> Machine:
        existing = next(
            (path for path in (cache_dir, *cache_dir.absolute().parents) if os.path.exists(path)), Path("/")
        )
        shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
        return Machine(available_ram(), shared, shutil.disk_usage(existing).free, _free_on_cards())


def _free_on_cards() -> tuple[int, ...]:
    """As CUDA numbers them for us. Asked of the driver's own tool: loading torch would take longer than all else here."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CARDS_S, check=True)
        free = [int(line) << 20 for line in done.stdout.split("\n") if line.strip()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    return tuple(free)


def visible_cards(cards: tuple[int, ...], visible: str | None) -> tuple[int, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order. Cards named by their UUID are counted, and taken for the first ones."""
    if visible is None:
        return cards
    names = [name.strip() for name in visible.split(",") if name.strip()]
    names = list(takewhile(lambda name: not name.startswith("-"), names))  # as CUDA does: nothing follows a -1
    chosen = [cards[int(name)] for name in names if name.isdecimal() and int(name) < len(cards)]
    return tuple(chosen) if chosen or not names else cards[: len(names)]
