"""What this process may use: as many files as it asks for; the machine's RAM and cores, or less where its container, its unit or a
group above that has a limit.

In a container the system still tells what the whole machine has; who takes that for its own is killed, or held up.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from math import ceil
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_GROUPS = "sys/fs/cgroup"
# The names in groups of version 2, then those of version 1.
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")


def all_ram(root: Path = _ROOT) -> int:
    """Bytes that we could have if nobody else had any."""
    return min([_machine_ram(root, "MemTotal:"), *(limit for _, limit in _memory_limits(root))])


def available_ram(root: Path = _ROOT) -> int:
    """Bytes that can be taken now."""
    left = [limit - _kept_bytes(group) for group, limit in _memory_limits(root)]
    return max(0, min([_machine_ram(root, "MemAvailable:"), *left]))


def usable_cores(root: Path = _ROOT) -> int:
    """Threads that can run at a time. A part of a core counts as one: another thread still gains that part."""
    cores = len(os.sched_getaffinity(0))
    for group in _own_groups(root, "cpu"):
        quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        for line in _lines(group / "cpu.max"):
            quota_us, period_us = (int(word) if word.isdigit() else None for word in line.split())
        if quota_us and period_us:
            cores = min(cores, ceil(quota_us / period_us))
    return max(1, cores)


def allow_files(wanted: int) -> int:
    """How many may be open now: so many, or as near to that as the system lets us. Many systems let a process have 1,024 until it
    asks for more, and every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # the system has a bound of its own
        return soft
    return allowed


def _own_groups(root: Path, controller: str) -> Iterator[Path]:
    """Our group's folder and those of the groups above it. A container often sees its own at the top, whatever it is called:
    then the others are not there."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.rstrip("\n").split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / _GROUPS / (controller if controllers else "")
        inside = PurePosixPath(name.lstrip("/"))
        if ".." in inside.parts:  # beside all that can be seen from here
            inside = PurePosixPath()
        yield from (top / one for one in (inside, *inside.parents))


def _machine_ram(root: Path, name: str) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    for group in _own_groups(root, "memory"):
        if limits := [number for name in _LIMITS if (number := _number(group / name)) is not None]:
            yield group, min(limits)


def _kept_bytes(group: Path) -> int:
    """What those in the group use, but for the file cache, which the system takes back before it kills anybody: else who has just
    read a model's files would seem to have no room left."""
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
    # Version 1 counts the groups below under other names, version 2 under these.
    cached = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("inactive_file", "active_file"))
    return max(_number(group / name) or 0 for name in _USED) - cached


def _number(path: Path) -> int | None:
    """None where there is no such file, and where it says that there is no limit."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    """Of a file that not every system has."""
    try:
        with path.open() as file:
            return file.readlines()
    except OSError:
        return []
