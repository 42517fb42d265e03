"""`stoker model` explains a bad value, and an address where no worker answers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from stoker.cli.main import main


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("a secret of the fleet that is long enough")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e9", "soon"])
def test_a_bad_drain_limit_is_refused(seconds: str, secret_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["model", "http://127.0.0.1:1", "m", "--secret-file", secret_file, f"--drain-s={seconds}"])
    assert ended.value.code == 2
    assert f"'{seconds}' is not a number of seconds from 0 to 86400" in capsys.readouterr().err


def test_a_port_without_http_is_named(secret_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["model", url, "m", "--secret-file", secret_file]) == 2
        thread.join()
    assert f"{url} does not answer: SSH-2.0-x" in capsys.readouterr().err
