"""`stoker launch` starts an agent that is pointed at a server, and says clearly why it cannot."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import main

MODELS = {"data": [{"id": "org/model", "max_model_len": 32768}, {"id": "other"}]}
# A stand-in for an agent: it writes what it was started with.
AGENT = """#!{python}
import json, os, sys
found = {{name: value for name, value in os.environ.items() if name.startswith(("ANTHROPIC", "STOKER", "OPENCODE", "CLAUDE"))}}
json.dump({{"argv": sys.argv, "environ": found}}, open(os.environ["SEEN"], "w"))
sys.exit(7)
"""


class Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_allowed = self.headers["Authorization"] in ("Bearer none", "Bearer sk-1")
        body = json.dumps(MODELS).encode()
        self.send_response(200 if is_allowed and self.path == "/v1/models" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Models)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def launch(tmp_path: Path, tool: str, *arguments: str) -> dict[str, Any]:
    """Run `stoker launch` in a process of its own, with a stand-in for the agent on PATH."""
    script = tmp_path / tool
    script.write_text(AGENT.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen")}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "ANTHROPIC_API_KEY": "sk-real"}
    command = [sys.executable, "-m", "stoker.cli.main", "launch", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    return json.loads((tmp_path / "seen").read_text())  # type: ignore[no-any-return]


def test_claude(tmp_path: Path, url: str) -> None:
    seen = launch(tmp_path, "claude", "--url", f"{url}/v1/", "--api-key", "sk-1", "claude", "--", "-p", "two words")
    assert seen["argv"][1:] == ["-p", "two words"]
    environment = seen["environ"]
    assert environment["ANTHROPIC_BASE_URL"] == url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "sk-1"
    assert environment["ANTHROPIC_API_KEY"] == ""
    assert environment["ANTHROPIC_MODEL"] == environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "org/model"


def test_codex(tmp_path: Path, url: str) -> None:
    seen = launch(tmp_path, "codex", "--url", url, "codex", "--", "exec", "hi")
    assert seen["argv"][-2:] == ["exec", "hi"]
    settings = [word for word in seen["argv"] if "=" in word]
    config = tomllib.loads("\n".join(settings))
    provider = config["model_providers"]["stoker"]
    assert (config["model"], config["model_context_window"]) == ("org/model", 32768)
    assert (provider["base_url"], provider["wire_api"]) == (f"{url}/v1", "responses")
    assert seen["environ"][provider["env_key"]] == "none"


def test_opencode(tmp_path: Path, url: str) -> None:
    seen = launch(tmp_path, "opencode", "opencode", "--url", url, "--model", "other")
    config = json.loads(Path(seen["environ"]["OPENCODE_CONFIG"]).read_text())
    assert config["model"] == "stoker/other"
    provider = config["provider"]["stoker"]
    assert provider["options"]["baseURL"] == f"{url}/v1"
    assert provider["options"]["apiKey"] == "{env:STOKER_API_KEY}"


@pytest.mark.parametrize("tool", ["codex", "claude", "opencode"])
def test_a_printed_configuration_starts_the_same(tmp_path: Path, url: str, tool: str) -> None:
    seen = launch(tmp_path, tool, tool, "--url", url, "--api-key", "sk-1")
    command = [sys.executable, "-m", "stoker.cli.main", "launch", tool, "--url", url, "--api-key", "sk-1", "--print"]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sk-1" not in script
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(tmp_path / "again")}
    environment |= {"STOKER_API_KEY": "sk-1", "ANTHROPIC_API_KEY": "sk-real"}
    subprocess.run(["sh", "-c", script], env=environment, cwd=tmp_path, check=False)
    again = json.loads((tmp_path / "again").read_text())
    assert again["argv"][1:] == seen["argv"][1:]
    written, named = seen["environ"].pop("OPENCODE_CONFIG", None), again["environ"].pop("OPENCODE_CONFIG", None)
    assert (written is None) == (named is None)
    if written is not None:
        assert json.loads(Path(written).read_text()) == json.loads(Path(named).read_text())
    again["environ"].pop("STOKER_API_KEY", None)
    seen["environ"].pop("STOKER_API_KEY", None)
    assert again["environ"] == seen["environ"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["emacs"], "emacs"),
        (["claude"], "npm install"),
        (["claude", "--print", "--url", "http://127.0.0.1:9"], "--model"),
        (["claude", "--print", "--url", "ftp://x"], "http://"),
        (["claude", "--print", "--model", "nope"], "org/model"),
        (["claude", "--print", "--api-key", "wrong"], "401"),
    ],
)
def test_errors_say_what_to_do(
    url: str,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    if "--url" not in arguments:
        arguments = [*arguments, "--url", url]
    assert main(["launch", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
