"""`stoker top`: once for scripts, and live in a terminal until q."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from waiting import LONG_S

from stoker.cli.main import main
from stoker.proto.admin_api import GatewayStatus, NowAnswer, SeriesAnswer, WorkerList, WorkerStatus

TOKEN = "the-admin-token-of-tests"
ANSWERS = {
    "/admin/status": GatewayStatus(version="1.2"),
    "/admin/now": NowAnswer(time_s=1.0, bottleneck="Idle: no request in the last minute.", values={}, point={}),
    "/admin/series": SeriesAnswer(step_s=1, times_s=[], columns={}),
    "/admin/fleet": WorkerList(workers=[WorkerStatus(worker="w:1", url="http://w:1", role="decode", usable=True)]),
}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_allowed = self.headers["authorization"] == f"Bearer {TOKEN}"
        found = ANSWERS.get(self.path.partition("?")[0])
        body = msgspec.json.encode(found) if found is not None and is_allowed else b"{}"
        self.send_response(200 if is_allowed else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[list[str]]:
    """Return the arguments that name a gateway."""
    (tmp_path / "token").write_text(TOKEN)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield ["--url", f"http://127.0.0.1:{server.server_port}", "--admin-token-file", str(tmp_path / "token")]
    server.shutdown()
    server.server_close()
    thread.join()


def test_once_prints_plain_text(gateway: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", *gateway]) == 0
    text = capsys.readouterr().out
    assert "Idle: no request in the last minute." in text
    assert "w:1" in text
    assert "\033" not in text


def test_a_wrong_token_and_a_silent_gateway_are_explained(
    gateway: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong").write_text("another-token-of-16-characters")
    assert main(["top", "--once", *gateway[:3], str(tmp_path / "wrong")]) == 2
    assert "check --admin-token-file" in capsys.readouterr().err
    assert main(["top", "--once", "--url", "http://127.0.0.1:1", *gateway[2:]]) == 2
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "61", "x", "nan"])
def test_a_wrong_interval_is_refused(value: str, gateway: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--interval", value, *gateway])
    assert "not a number from 0.2 to 60" in capsys.readouterr().err


def test_a_terminal_shows_it_until_q_and_is_restored(gateway: list[str]) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "stoker.cli.main", "top", "--interval", "0.2", *gateway]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    seen, end_s, has_quit = b"", time.monotonic() + LONG_S, False
    try:
        while time.monotonic() < end_s and process.poll() is None:
            if select.select([controller], [], [], 0.05)[0]:
                try:
                    seen += os.read(controller, 65536)
                except OSError:  # the terminal is closed
                    break
            if seen.count(b"Idle") >= 2 and not has_quit:
                has_quit = True
                os.write(controller, b"q")
        assert process.wait(LONG_S) == 0, seen
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    assert seen.startswith(b"\033[?1049h")
    assert seen.rstrip().endswith(b"\033[?25h\033[?1049l")
