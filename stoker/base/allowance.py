"""The resources that this process may use: RAM, CPU cores and open files. RAM and cores include the limits of its cgroups.

Inside a container, the system still reports the whole machine. A process that uses more than its cgroup allows is killed or
throttled.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from math import ceil
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_GROUPS = "sys/fs/cgroup"
# File names of cgroup version 2, then of version 1.
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")


def all_ram(root: Path = _ROOT) -> int:
    """Return the total RAM that this process could use, in bytes."""
    return min([_machine_ram(root, "MemTotal:"), *(limit for _, limit in _memory_limits(root))])


def available_ram(root: Path = _ROOT) -> int:
    """Return the RAM that is available now, in bytes."""
    left = [limit - _used_bytes(group) for group, limit in _memory_limits(root)]
    return max(0, min([_machine_ram(root, "MemAvailable:"), *left]))


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many threads can run at the same time. A fraction of a core counts as one more thread."""
    cores = len(os.sched_getaffinity(0))
    for group in _own_groups(root, "cpu"):
        quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        for line in _lines(group / "cpu.max"):
            quota_us, period_us = (int(word) if word.isdigit() else None for word in line.split())
        if quota_us and period_us:
            cores = min(cores, ceil(quota_us / period_us))
    return max(1, cores)


def allow_files(count: int) -> int:
    """Raise the limit of open files to at least `count`, or as close as the system permits. Return the new limit.

    Many systems start a process with a soft limit of 1,024, and every connection is an open file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # the kernel has a lower limit
        return soft
    return allowed


def _own_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's cgroup and of the cgroups above it.

    Inside a container, the container's own cgroup is often mounted at the top. Then the yielded folders may not exist.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.rstrip("\n").split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / _GROUPS / (controller if controllers else "")
        inside = PurePosixPath(name.lstrip("/"))
        if ".." in inside.parts:  # outside of what this container can see
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


def _used_bytes(group: Path) -> int:
    """Return the memory used by a cgroup, without the page cache.

    The kernel reclaims the page cache before it kills a process. With the page cache counted as used, hardly any memory would
    appear free after a model file was read.
    """
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
    # Both versions also count the cgroups below this one. Version 1 calls these totals `total_…`.
    cached = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("inactive_file", "active_file"))
    return max(_number(group / name) or 0 for name in _USED) - cached


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if the file does not exist or says that there is no limit."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or [] if the system has no such file."""
    try:
        with path.open() as file:
            return file.readlines()
    except OSError:
        return []
