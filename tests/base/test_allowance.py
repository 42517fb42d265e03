"""The limits of a container count, not the size of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.base.allowance import all_ram, available_ram, usable_cores

GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {1024 * GIB // 1024} kB\nMemAvailable: {900 * GIB // 1024} kB\n"}
NO_LIMIT = "9223372036854771712\n"  # as version 1 writes it


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in (MACHINE | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path, cores: None) -> None:
    root = system(tmp_path, {})
    assert (available_ram(root), usable_cores(root)) == (900 * GIB, 64)
    assert all_ram(root) == 1024 * GIB


def test_cgroups_without_limits_are_ignored(tmp_path: Path, cores: None) -> None:
    old = "sys/fs/cgroup/memory/session"
    files = {"proc/self/cgroup": "4:memory:/session\n2:cpu,cpuacct:/\n1:name=systemd:/a\n0::/\n"}
    files |= {f"{old}/memory.limit_in_bytes": NO_LIMIT, f"{old}/memory.usage_in_bytes": str(5 * GIB)}
    files |= {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    files |= {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
    root = system(tmp_path, files)
    assert (available_ram(root), usable_cores(root)) == (900 * GIB, 64)


def test_a_container_with_its_own_cgroup_at_the_top_has_its_limits(tmp_path: Path, cores: None) -> None:
    files = {
        "proc/self/cgroup": "0::/kubepods/pod-1/c-2\n",  # the name outside, which is not there inside
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/cpu.max": "400000 100000\n",
    }
    root = system(tmp_path, files)
    assert (available_ram(root), usable_cores(root)) == (5 * GIB, 4)
    assert all_ram(root) == 8 * GIB


def test_the_lowest_limit_of_all_cgroups_above_counts(tmp_path: Path, cores: None) -> None:
    top = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/user.slice/stoker.service\n",
        f"{top}/user.slice/stoker.service/memory.max": "max\n",
        f"{top}/user.slice/stoker.service/memory.high": f"{20 * GIB}\n",
        f"{top}/user.slice/stoker.service/memory.current": f"{GIB}\n",
        f"{top}/user.slice/stoker.service/cpu.max": "max 100000\n",
        f"{top}/user.slice/memory.max": f"{32 * GIB}\n",
        f"{top}/user.slice/memory.current": f"{30 * GIB}\n",
        f"{top}/user.slice/cpu.max": "150000 100000\n",
    }
    root = system(tmp_path, files)
    assert (available_ram(root), usable_cores(root)) == (2 * GIB, 2)
    (root / f"{top}/user.slice/memory.current").write_text(f"{GIB}\n")
    assert available_ram(root) == 19 * GIB  # above that, who asks for memory is held up


def test_cgroups_of_version_1_are_read(tmp_path: Path, cores: None) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/docker/0af\n3:cpu,cpuacct:/docker/0af\n0::/docker/0af\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    root = system(tmp_path, files)
    assert (available_ram(root), usable_cores(root)) == (6 * GIB, 3)


@pytest.mark.parametrize(
    ("group", "limit", "used", "cache"),
    [
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file {}\nactive_file 0\nanon 7\n"),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "inactive_file 4096\nactive_file 0\ntotal_inactive_file {}\ntotal_active_file 0\n",
        ),
    ],
)
def test_the_page_cache_does_not_count_as_used(tmp_path: Path, group: str, limit: str, used: str, cache: str) -> None:
    files = {"proc/self/cgroup": "5:memory:/\n0::/\n", f"{group}/{limit}": f"{8 * GIB}\n"}
    files |= {f"{group}/{used}": f"{8 * GIB - 4096}\n", f"{group}/memory.stat": cache.format(6 * GIB)}
    assert available_ram(system(tmp_path, files)) == 6 * GIB + 4096


def test_a_full_cgroup_leaves_no_memory_and_one_core(tmp_path: Path, cores: None) -> None:
    files = {
        "proc/self/cgroup": "0::/../beside\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB + 4096}\n",
        "sys/fs/cgroup/cpu.max": "10000 100000\n",
    }
    root = system(tmp_path, files)
    assert (available_ram(root), usable_cores(root)) == (0, 1)


_ASK = """
import resource
from stoker.base.allowance import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
print(allow_files({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("wanted", "told", "allowed"), [(50, 50, 64), (100, 100, 100), (300, 200, 200)])
def test_the_limit_of_open_files_is_raised_as_far_as_permitted(wanted: int, told: int, allowed: int) -> None:
    """Runs in a child process: this one may have more files open than the limit."""
    ask = _ASK.format(hard=200, wanted=wanted)
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [str(told), str(allowed)]
