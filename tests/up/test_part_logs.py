"""The log files of a fleet: rotated while processes write, private, and complete; a full disk delays no process."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from stoker.up.part_log import PartLog
from stoker.up.process import PartProcess
from stoker.up.rotating_file import RotatingFile


def lines_of(folder: Path) -> list[str]:
    """All lines, oldest first."""
    paths = sorted(folder.iterdir(), key=lambda path: -int(path.suffix[1:]) if path.suffix != ".log" else 0)
    return [line for path in paths for line in path.read_text().splitlines()]


def run(program: str, file: RotatingFile) -> tuple[int, PartLog]:
    async def life() -> tuple[int, PartLog]:
        process = await PartProcess.start((sys.executable, "-c", program), os.environ, file)
        async with asyncio.timeout(60):
            return await process.wait(), process.log

    return asyncio.run(life())


def test_a_log_is_rotated_while_its_process_writes_and_no_line_is_lost(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "logs" / "x.log", max_bytes=50_000, max_files=100)
    program = "import sys\nfor number in range(20_000): print(number, 'x' * (number % 97), file=sys.stderr)"
    assert run(program, file)[0] == 0
    lines = lines_of(tmp_path / "logs")
    assert [int(line.split()[0]) for line in lines] == list(range(20_000))
    sizes = [path.stat().st_size for path in (tmp_path / "logs").iterdir()]
    assert len(sizes) > 10
    assert max(sizes) < 50_000 + (1 << 16) + 200, "one read and one line more than the limit"


def test_only_the_newest_files_are_kept_and_only_the_user_can_read_them(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "x.log"
    path.parent.mkdir()
    path.write_text("of an earlier version\n")
    path.chmod(0o644)
    file = RotatingFile(path, max_bytes=100, max_files=3)
    for number in range(1000):
        file.write(b"line %d\n" % number)
    assert {one.name for one in path.parent.iterdir()} == {"x.log", "x.log.1", "x.log.2"}
    assert {stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()} == {0o600}
    lines = lines_of(path.parent)
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    file.close()


def test_a_line_without_an_end_does_not_fill_the_disk(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "x.log", max_bytes=1000, max_files=2)
    for _ in range(200):
        file.write(b"x" * (1 << 16))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 << 20
    file.close()


def test_one_file_can_be_all_that_is_kept(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "x.log", max_bytes=10, max_files=1)
    for number in range(20):
        file.write(b"line %d\n" % number)
    assert [path.name for path in tmp_path.iterdir()] == ["x.log"]
    assert lines_of(tmp_path)[-1] == "line 19"
    file.close()


def test_a_full_disk_costs_lines_but_delays_no_process(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.symlink_to("/dev/full")
    file = RotatingFile(path, max_bytes=1e9, max_files=3)
    code, log = run("import sys\nfor number in range(100_000): print('x' * 90, number, file=sys.stderr)", file)
    assert code == 0
    assert log.last_lines(1)[0].endswith(" 99999")
    assert file.problem == f"{path}: No space left on device"
    path.unlink()  # repaired
    file.write(b"after\n")
    lost, after = path.read_text().strip().splitlines()
    assert after == "after"
    assert "log_bytes_lost" in lost
    assert file.problem is None
    file.close()


def test_progress_lines_are_shown_but_events_and_tracebacks_are_not(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "x.log", 1e9, 2)
    file.write(b"of an earlier process\n")
    log = PartLog(file)
    with log.writer():
        os.write(log.write_fd, b'loading weights\n{"event": "x"}\nhalf a li')
        seen: list[str] = []
        while not seen:
            time.sleep(0.001)
            seen = log.new_lines()
        assert seen == ["loading weights"]
        os.write(log.write_fd, b"ne\nTraceback (most recent call last):\n  File\nOops: no\n")
    log.finish(30)
    assert log.new_lines() == ["half a line"]
    assert log.new_lines() == []
    assert log.last_lines(2) == ["  File", "Oops: no"]
    assert "of an earlier process" not in log.last_lines(100)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_new_files_are_private_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        file = RotatingFile(tmp_path / "logs" / "x.log", 1e9, 2)
        file.write(b"x")
        file.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "logs" / "x.log").stat().st_mode) == 0o600
    assert not stat.S_IMODE((tmp_path / "logs").stat().st_mode) & 0o077
