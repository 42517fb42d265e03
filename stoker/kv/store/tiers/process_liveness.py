"""Whether the process that left something unfinished is still running. A pid alone is not enough, because pids
are reused."""

from __future__ import annotations

from pathlib import Path


def started_at(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The command's name is in parentheses, and may itself contain parentheses and spaces.
    state, *rest = stat[stat.rindex(b")") + 2 :].split()
    return 0 if state in (b"Z", b"X") else int(rest[18])


def is_alive(pid: int, started: int) -> bool:
    """Return True if the process that had this pid and start time is still running."""
    return started != 0 and started_at(pid) == started
