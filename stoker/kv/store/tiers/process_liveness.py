"""Whether the process that left something half-done is still there. A pid alone does not say: pids are used again."""

from __future__ import annotations

from pathlib import Path


def started_at(pid: int) -> int:
    """Clock ticks from boot to its start; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The command's name, in brackets, may itself hold brackets and blanks.
    state, *rest = stat[stat.rindex(b")") + 2 :].split()
    return 0 if state in (b"Z", b"X") else int(rest[18])


def is_alive(pid: int, started: int) -> bool:
    return started != 0 and started_at(pid) == started
