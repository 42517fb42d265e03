"""The run folder, ports and logs of a fleet, and `stoker status`."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from stoker.base.bound_socket import bound_socket, shared_socket
from stoker.base.errors import ConfigError
from stoker.cli.main import main
from stoker.proto.fleet_state import FleetState, PartInfo
from stoker.proto.tier_metrics import read_tier_metrics
from stoker.up.ports import ReservedPorts
from stoker.up.state import abandoned_fleets, living_fleets, open_run_dir
from stoker.up.status import FleetStatus, PartStatus, format_status

PART = PartInfo(
    name="decode-0",
    kind="worker",
    role="decode",
    address="http://127.0.0.1:9",
    phase="ready",
    pid=7,
    restarts=2,
    last_code=-9,
    log="/x.log",
)
STATE = FleetState(
    pid=1,
    started_at=0.0,
    gateway_url="http://127.0.0.1:1",
    admin_token_file="/t",
    store_name="s",
    log_dir="/l",
    models=["m"],
    parts=[PART],
)


def test_a_run_folder_is_private_and_found_until_it_is_removed(tmp_path: Path) -> None:
    ours = open_run_dir(tmp_path / "fleets", 8000)
    assert list(living_fleets(tmp_path / "fleets")) == []  # nothing is known of it yet
    ours.write_state(STATE)
    secret = ours.write_secret("secret")
    assert stat.S_IMODE((ours.path / "state.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(ours.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(secret.read_text()) > 30
    assert list(living_fleets(tmp_path / "fleets")) == [STATE]
    with pytest.raises(ConfigError, match=r"a fleet is already running on port 8000 \(process 1\)"):
        open_run_dir(tmp_path / "fleets", 8000)
    ours.remove()
    assert list((tmp_path / "fleets").iterdir()) == []
    open_run_dir(tmp_path / "fleets", 8000).remove()


def test_state_files_of_other_versions_can_be_read(tmp_path: Path) -> None:
    theirs = open_run_dir(tmp_path / "fleets", 8000)
    old = {"pid": 1, "started_at": 0.0, "gateway_url": "http://g", "store_name": "s", "parts": [{"name": "p"}], "x": 1}
    (theirs.path / "state.json").write_text(json.dumps(old))
    [living] = living_fleets(tmp_path / "fleets")
    assert [part.name for part in living.parts] == ["p"]
    theirs._lock.close()  # killed
    [left] = abandoned_fleets(tmp_path / "fleets")
    assert left.left is not None
    assert left.left.store_name == "s"
    left.remove()


NOWHERE = "x" * 300  # no system has such a name: looking for it is an error, as it is in another user's home


def test_the_error_for_an_unreadable_state_folder_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", f"/{NOWHERE}")
    assert main(["status"]) == 2
    assert main(["up", "--unified", "1", "--port", "0"]) == 2
    assert capsys.readouterr().err.count("choose another folder (XDG_STATE_HOME)") == 2


def test_other_unreadable_folders_do_not_stop_the_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--check", "--cache-dir", f"/{NOWHERE}"]) == 0
    assert main(["up", "--check", f"/{NOWHERE}"]) == 2
    assert f"{NOWHERE}: there is no such file" in capsys.readouterr().err


def test_the_error_for_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    ours = open_run_dir(tmp_path / "fleets", 8000)
    (ours.path / "secret").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"secret: No space left on device; choose another folder \(XDG_STATE_HOME\)"):
        ours.write_secret("secret")
    ours.remove()


def test_a_second_fleet_on_a_port_is_refused_with_the_first_ones_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    fleets = tmp_path / "stoker" / "fleets"
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["up", "--unified", "1", "--port", str(port)]) == 2
        assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in capsys.readouterr().err
        assert list(fleets.iterdir()) == []
        first = open_run_dir(fleets, port)
        first.write_state(STATE)
        assert main(["up", "--unified", "1", "--port", str(port)]) == 2
        assert f"a fleet is already running on port {port} (process 1)" in capsys.readouterr().err
        first.remove()


def test_killed_and_running_fleets_are_told_apart(tmp_path: Path) -> None:
    leave = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import test_up_files as t; from pathlib import Path\n"
        "t.open_run_dir(Path(sys.argv[2]), 8000).write_state(t.STATE); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", leave, str(Path(__file__).parent), str(tmp_path)], check=False, timeout=60)
    living = open_run_dir(tmp_path, 8001)
    living.write_state(STATE)
    assert len(list(living_fleets(tmp_path))) == 1
    (left,) = abandoned_fleets(tmp_path)
    assert left.left == STATE
    left.remove()
    assert list(abandoned_fleets(tmp_path)) == []
    living.remove()


def test_a_reserved_port_is_usable_only_by_its_own_part() -> None:
    ports, others = ReservedPorts(), ReservedPorts()
    port = ports.take("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="another process of this fleet has it"):
        ports.take("127.0.0.1", port)
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))  # a process that knows nothing of the reservation
    with pytest.raises(ConfigError, match="another fleet has reserved it"):
        others.take("127.0.0.1", port)  # also while no process listens there
    assert others.take_after("127.0.0.1", port - 1) != port
    for _ in range(2):  # the part, and the restarted part
        with bound_socket("127.0.0.1", port) as listener:
            listener.listen()
            with pytest.raises(ConfigError, match="Address already in use"):
                others.take("127.0.0.1", port)
            assert others.take_after("127.0.0.1", port - 1) > port
    with ExitStack() as stack:  # a gateway of several processes: one socket holds the port, and each process listens
        stack.enter_context(shared_socket("127.0.0.1", port))
        for _ in range(2):
            stack.enter_context(shared_socket("127.0.0.1", port)).listen()
    with pytest.raises(ConfigError, match=r"port 0 of a\.\.b cannot be used: .*; choose another port"):
        ports.take("a..b", 0)
    with pytest.raises(ConfigError, match=r"cannot listen on a\.\.b:0: .*; choose another --host or --port"):
        bound_socket("a..b", 0)
    ports.close()
    others.close()


class Stranger(BaseHTTPRequestHandler):
    """Answers, and is no gateway."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        """Not into the tests' output."""


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"workers": [{}]}', b"{nonsense"])
def test_status_of_what_is_no_gateway_says_so(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), type("Server", (Stranger,), {"body": body})) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert main(["status", "--url", url]) == 1
        finally:
            server.shutdown()
            serving.join()
    assert f"{url} does not answer as a gateway does" in capsys.readouterr().err


def test_status_of_a_machine_without_fleets_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["status"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Start one with `stoker up`" in captured.err
    assert main(["status", "--json"]) == 3
    assert capsys.readouterr().out == "[]\n"
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "stoker: no gateway answers at http://127.0.0.1:9 (Connection refused): check the address, or start one there with "
        "`stoker up` or `stoker gateway`\n"
    )


def test_tiers_are_read_from_metrics_and_shown() -> None:
    page = """# HELP stoker_kv_tier_blocks Blocks
stoker_kv_tier_blocks{tier="host"} 1234.0
stoker_kv_tier_used_bytes{tier="host"} 1.073741824e+09
stoker_kv_tier_hits_total{tier="disk"} 5.0
stoker_running_requests 3.0
"""
    tiers = read_tier_metrics(page)
    assert tiers == {"host": {"blocks": 1234, "used_bytes": 1 << 30}, "disk": {"hits": 5}}
    part = PartStatus(
        "decode-0", "decode", "http://x:1", "ready", 7, 2, load={"requests": 1, "kv_used": 0.5}, tiers=tiers
    )
    text = format_status(FleetStatus("http://g", True, None, [part], pid=3, up_s=3700, models=["m"]))
    assert "up for 1 h 1 min" in text
    assert "1 in flight, KV 50%" in text
    assert text.splitlines()[-2].split() == ["decode-0", "host", "1,234", "1.00", "GiB", "-", "-", "-", "-", "0"]


def test_names_of_models_and_tiers_cannot_control_the_terminal() -> None:
    tiers = {"host\033[2J": {"blocks": 1.0}}
    part = PartStatus("decode-0", "decode", "http://x:1\r", "ready", 7, 2, load={"requests": 1}, tiers=tiers)
    text = format_status(FleetStatus("http://g", True, None, [part], models=["m\033]0;title\007"]))
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "host?[2J" in text
