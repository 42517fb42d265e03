"""The request log: one line per request, written in the background."""

from __future__ import annotations

import errno
import json
import threading

import msgspec
from waiting import LONG_S

from stoker.base.log_lines import MAX_LINE_BYTES
from stoker.gateway.records.request_log import NoRequestLog, RequestLog
from stoker.gateway.records.usage_row import UsageRow

ROW = UsageRow(
    "r1", 1_700_000_000.25, "k", "t", "m", "s\n", "w:1", "chat", 200, 10, 4, 3, 5.04, 1000.0, policy="cost"
)  # fmt: skip


def test_every_request_is_one_json_line() -> None:
    written: list[bytes] = []
    requests = RequestLog(written.append)
    for _ in range(2500):
        requests.record(ROW)
    requests.close()
    lines = b"".join(written).splitlines()
    assert len(lines) == 2500
    line = json.loads(lines[0])
    assert line["time"] == "2023-11-14T22:13:21.250Z"
    assert (line["event"], line["request_id"], line["status"], line["session"]) == ("request", "r1", 200, "s\n")
    assert (line["e2e_ms"], line["ttft_ms"], line["policy"]) == (1000.0, 5.04, "cost")
    assert requests.dropped == 0


def test_what_cannot_be_written_in_time_is_dropped_and_counted() -> None:
    written: list[bytes] = []
    requests = RequestLog(written.append, max_pending=10)
    for _ in range(1000):
        requests.record(ROW)
    requests.close()
    assert requests.dropped + len(b"".join(written).splitlines()) == 1000
    assert requests.dropped > 0


def test_a_disk_that_was_full_costs_the_lines_of_that_time_and_no_others() -> None:
    written: list[bytes] = []
    was_full = threading.Event()

    def write(lines: bytes) -> None:
        if not was_full.is_set():
            was_full.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(lines)

    requests = RequestLog(write)
    requests.record(ROW)
    assert was_full.wait(LONG_S)
    requests.record(ROW)
    requests.close()
    assert len(b"".join(written).splitlines()) == 1
    assert requests.dropped == 1


def test_a_client_can_neither_forge_nor_fill_the_log() -> None:
    written: list[bytes] = []
    requests = RequestLog(written.append)
    for text in ('x\n{"event": "forged"}\u2028\u0085\x7f\x1b[2J', "m" * 1_000_000, "\U0001f600" * 100_000):
        requests.record(msgspec.structs.replace(ROW, model=text, session=text))
    requests.close()
    lines = b"".join(written).decode("ascii").splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["request"] * 3
    assert all(len(line) < MAX_LINE_BYTES for line in lines)
    assert not any("\x7f" in line for line in lines)
    assert all(group.endswith(b"\n") and len(group) <= MAX_LINE_BYTES for group in written)


def test_off() -> None:
    requests = NoRequestLog()
    requests.record(ROW)
    requests.close()
