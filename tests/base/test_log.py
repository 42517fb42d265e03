"""Logs under attack: long values, forged lines, floods, full disks and pipes that are not read."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.base.log import LogHandler
from stoker.base.log_limit import EventLimiter
from stoker.base.log_lines import MAX_LINE_BYTES, log_line
from stoker.base.log_output import LogOutput, line_groups

BASE = {"time": "t", "level": "warning", "part": "p", "event": "bad_request"}
FORGED = 'x\n{"time": "2026", "event": "key_created"}\r\u2028\u0085\x1b[2J\x7f\ud800'


class BadWords:
    def __str__(self) -> str:
        raise ValueError("no words")


VALUES: dict[str, object] = {
    "long": "a" * 60_000_000,
    "astral": "\U0001f600" * 100_000,
    "list": ["m" * 1000] * 100_000,
    "table": {str(number): {"x": ["y" * 5000] * 1000} for number in range(10_000)},
    "number": 10**5000,
    "bytes": b"\0" * 1_000_000,
    "deep": [[[[[[["deep" * 10_000]]]]]]],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_line_is_bounded_whatever_is_logged(value: object) -> None:
    line = log_line(BASE | {"reason": value, "other": 7})
    assert len(line) <= MAX_LINE_BYTES
    read = json.loads(line)
    assert (read["event"], read["other"]) == ("bad_request", 7)


def test_many_fields_are_dropped_and_counted() -> None:
    line = log_line(BASE | {f"field{number}": "x" * 500 for number in range(1000)})
    assert len(line) <= MAX_LINE_BYTES
    assert json.loads(line) == BASE | {"fields_dropped": 1000}


def test_a_value_cannot_forge_a_line() -> None:
    for fields in ({"reason": FORGED}, {FORGED: 1}, {"reason": [{FORGED: FORGED}]}, {"event": FORGED}):
        line = log_line(BASE | fields)
        assert line.isascii()
        assert line.count(b"\n") == 1
        assert len(line.decode().splitlines()) == 1
        assert not set(line) & {0x1B, 0x7F, ord("\r")}
    assert json.loads(log_line(BASE | {"reason": FORGED}))["reason"] == FORGED


def test_a_shortened_value_says_so_and_keeps_both_ends() -> None:
    reason = json.loads(log_line(BASE | {"reason": "start" + "x" * 100_000 + "end"}))["reason"]
    assert reason.startswith("start")
    assert reason.endswith("end")
    assert "(100008 characters)" in reason


def test_lines_of_one_event_are_limited_and_the_rest_is_counted() -> None:
    limiter = EventLimiter(max_per_s=20)
    assert sum(limiter.admit("bad_request", 5 + number * 1e-4) for number in range(5000)) == 20
    assert limiter.admit("other", 5.5)
    assert limiter.take_suppressed(5.5) == []
    assert limiter.take_suppressed(6.0) == [("bad_request", 4980)]
    assert limiter.take_suppressed(6.0) == []
    assert sum(limiter.admit("bad_request", 7 + number * 0.06) for number in range(100)) == 100


def test_invented_events_take_no_memory() -> None:
    limiter = EventLimiter()
    for number in range(100_000):
        limiter.admit(str(number), 0.0)
    assert len(limiter._windows) <= 1000


def handled(fd: int) -> tuple[logging.Logger, LogHandler]:
    handler = LogHandler(LogOutput(fd), EventLimiter(max_per_s=3))
    logger = logging.Logger("stoker.test")
    logger.addHandler(handler)
    return logger, handler


def test_a_flood_of_warnings_is_some_lines_and_a_count(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    logger, handler = handled(fd)
    for _ in range(1000):
        logger.warning("bad_request", extra={"fields": {"reason": FORGED}})
    logger.warning("odd", extra={"fields": {"reason": BadWords()}})
    logger.info("still here")
    handler.flush()
    os.close(fd)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    counts = sum(line["lines"] for line in lines if line["event"] == "lines_suppressed")
    assert sum(line["event"] == "bad_request" for line in lines) + counts == 1000
    assert len(lines) < 20
    assert any(line["event"] == "still here" for line in lines)
    assert [line["unreadable_fields"] for line in lines if line["event"] == "odd"] == ["ValueError"]


def test_a_pipe_that_is_not_read_costs_lines_but_no_time() -> None:
    reader, writer = os.pipe()
    logger, _ = handled(writer)
    for number in range(1000):  # far more than a pipe holds
        logger.info("event %d", number, extra={"fields": {"text": "x" * 1000}})
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK, "other processes have the same pipe"
    read = os.read(reader, 1 << 20)
    logger.info("after")
    os.close(writer)
    read += os.read(reader, 1 << 20)
    lines = [json.loads(line) for line in read.splitlines()]
    [dropped] = [line["lines"] for line in lines if line["event"] == "lines_dropped"]
    assert dropped + sum(line["event"].startswith("event ") for line in lines) == 1000
    os.close(reader)


def test_a_full_disk_costs_lines_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    logger, _ = handled(fd)
    logger.error("lost")
    os.close(fd)
    logger.error("closed")
    assert capsys.readouterr().err == ""


def test_groups_of_lines_are_whole_and_in_order() -> None:
    lines = [b"%d %s\n" % (number, b"x" * (number * 37 % 1500)) for number in range(500)]
    groups = list(line_groups(lines))
    assert b"".join(groups) == b"".join(lines)
    assert all(len(group) <= MAX_LINE_BYTES and group.endswith(b"\n") for group in groups)


def test_errors_of_libraries_are_json_lines_too() -> None:
    program = (
        "import asyncio\nfrom stoker.base import log\nlog.set_up()\n"
        'async def task():\n    raise ValueError(\'x\\n{"event": "forged"}\')\n'
        "async def main():\n    asyncio.create_task(task())\n    await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True).stderr
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["part"] for line in lines] == ["asyncio"]
    assert "forged" in lines[0]["trace"]
