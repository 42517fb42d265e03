"""`stoker gateway`: its help, its keys, its settings, and the running process."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted_server import Reply, ScriptedServer, Seen, answer

from stoker.base.errors import ConfigError
from stoker.base.settings import declared
from stoker.cli import gateway
from stoker.cli.main import main
from stoker.gateway.config import GatewayConfig

STOKER = str(Path(sys.executable).parent / "stoker")


def config_of(*arguments: str, environment: dict[str, str] | None = None) -> GatewayConfig:
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    args = parser.parse_args(arguments)
    return gateway.gateway_config(args, environment or {"HOME": "/home/x"})


def test_the_help_shows_how_to_name_a_worker_and_make_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gateway", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for words in (
        "--worker http://",
        "dialect=vllm",
        "role=prefill",
        "stoker keys create",
        "--config",
        "--admin-token-file",
    ):
        assert words in shown


def test_the_earlier_way_to_make_keys_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--new-key", "alice"]) == 2
    assert "use `stoker keys create NAME`" in capsys.readouterr().err


def test_every_flag_of_the_settings_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    known = {text for action in parser._actions for text in action.option_strings}
    assert {one.flag for one in declared(GatewayConfig) if one.setting.flag is not None} - known == set()


def test_flags_become_settings() -> None:
    config = config_of(
        *("--port", "9", "--host", "::", "--policy", "random", "--debug-routes", "--no-request-log"),
        *("--worker", "http://a:1,role=prefill", "--worker", "http://b:2", "--store", "x.db", "--drain-s", "3"),
        *("--otlp-endpoint", "http://c/v1/traces", "--max-body-mib", "1.5", "--no-tokenize"),
    )
    assert (config.listen.port, config.listen.host, config.listen.drain_s, config.listen.max_body_mib) == (
        9,
        "::",
        3,
        1.5,
    )
    assert (config.routing.policy, config.routing.debug_routes, config.routing.tokenize) == ("random", True, False)
    assert [worker.url for worker in config.worker] == ["http://a:1", "http://b:2"]
    assert config.store == "x.db"
    assert config.tracing.otlp_endpoint == "http://c/v1/traces"
    assert not config.log_requests


def test_the_store_is_in_the_state_folder_by_default(tmp_path: Path) -> None:
    assert config_of().store_location.name == "/home/x/.local/state/stoker/store.db"
    assert config_of(environment={"XDG_STATE_HOME": "/s"}).store_location.name == "/s/stoker/store.db"
    assert config_of("--store", "none").store_location is None
    file = tmp_path / "gateway.toml"
    file.write_text("store = 'from-file.db'")
    assert config_of("--config", str(file)).store == "from-file.db"


def test_the_ledgers_earlier_flag_and_file_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ledger was renamed: use --store"):
        config_of("--ledger", "x.db")
    (tmp_path / "stoker").mkdir()
    (tmp_path / "stoker" / "usage.db").touch()
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"Keep it with `mv .*usage.db .*store.db`"):
        config_of(environment=environment)
    (tmp_path / "stoker" / "usage.db").rename(tmp_path / "stoker" / "store.db")
    assert config_of(environment=environment).store_location is not None


def test_a_wrong_worker_is_quoted_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--worker", "http://a,role=boss"]) == 2
    assert "role='boss': give unified, prefill or decode" in capsys.readouterr().err
    assert main(["gateway", "--port", "0", "--policy", "wishful", "--store", "none"]) == 2
    assert "unknown routing policy 'wishful'; available: " in capsys.readouterr().err
    assert main(["gateway", "--port", "0", "--worker", "http://a,dialect=klingon", "--store", "none"]) == 2
    assert "klingon" in capsys.readouterr().err


# ---- the process


@dataclass
class Running:
    process: subprocess.Popen[str]
    welcome: str
    url: str
    log: Path

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def started(tmp_path: Path, *arguments: str) -> Iterator[Running]:
    log = tmp_path / "gateway.log"
    command = [STOKER, "gateway", "--port", "0", *arguments]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        welcome = ""
        while "}'" not in welcome:
            line = process.stdout.readline()
            assert line, log.read_text()
            welcome += line
        found = re.search(r"https?://127\.0\.0\.1:\d+", welcome)
        assert found is not None
        while not json.loads(curl("--insecure", f"{found[0]}/v1/models"))["data"]:
            time.sleep(0.05)  # the gateway starts before it has probed slow workers
        yield Running(process, welcome, found[0], log)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "-sS", "-m", "60", *arguments], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def whole(seen: Seen) -> Reply:
    """Answer a whole request. The scripted server only streams, so the request must stream too."""
    return answer("The", " capital", prompt_tokens=10, cached_tokens=4)


def rows(path: Path) -> Sequence[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return list(
            connection.execute("SELECT model, status, prompt_tokens, cached_tokens, completion_tokens FROM usage")
        )


def test_a_gateway_without_workers_says_how_to_add_them() -> None:
    command = [STOKER, "gateway", "--port", "0", "--store", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        watchdog = threading.Timer(240, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            welcome = next(line for line in process.stdout if line.strip())
        finally:
            watchdog.cancel()
            process.kill()
    assert "routes to 0 workers. It can serve nothing: add workers with --worker URL" in welcome


def test_the_printed_curl_line_works_and_sigterm_ends_cleanly(tmp_path: Path, server: ScriptedServer) -> None:
    server.script = whole
    ledger = tmp_path / "usage.db"
    with started(tmp_path, "--worker", f"{server.url},dialect=openai", "--store", str(ledger)) as running:
        assert "scripted" in running.welcome
        command = shlex.split(running.welcome[running.welcome.index("curl") :].replace("\\\n", " "))
        body = json.loads(command[-1])
        assert body["model"] == "scripted"
        streamed = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
        shown = curl(*command[1:-1], streamed)
        assert "capital" in shown
        assert shown.rstrip().endswith("data: [DONE]")
        models = json.loads(curl(f"{running.url}/v1/models"))
        assert [model["id"] for model in models["data"]] == ["scripted"]
        assert running.stop() == 0
    assert rows(ledger) == [("scripted", 200, 10, 4, 2)]
    lines = [json.loads(line) for line in running.log.read_text().splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["status"], line["endpoint"]) == (200, "chat")


def test_ctrl_c_ends_cleanly_too_and_usage_is_served(tmp_path: Path, server: ScriptedServer) -> None:
    server.script = whole
    token = tmp_path / "token"
    token.write_text("an-admin-token-for-tests\n")
    options = ["--worker", f"{server.url},dialect=openai", "--store", str(tmp_path / "u.db")]
    with started(tmp_path, *options, "--admin-token-file", str(token)) as running:
        body = json.dumps({"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "Hi"}]})
        curl(f"{running.url}/v1/chat/completions", "-d", body)
        usage: dict[str, dict[str, object]] = {}
        for _ in range(500):
            usage = json.loads(
                curl(f"{running.url}/v1/usage?group_by=model", "-H", "Authorization: Bearer an-admin-token-for-tests")
            )
            if usage["total"]["requests"]:
                break
        assert usage["total"]["requests"] == 1
        assert usage["total"]["cached_tokens"] == 4
        assert "stoker_gateway_requests_total" in curl(f"{running.url}/metrics")
        in_flight = json.loads(
            curl(f"{running.url}/admin/ledger", "-H", "Authorization: Bearer an-admin-token-for-tests")
        )
        assert in_flight["reserved"]["requests"] == in_flight["admitted"]["requests"] == 0
        assert running.stop(signal.SIGINT) == 0


def test_the_first_signal_waits_for_running_requests_and_the_second_does_not(
    tmp_path: Path, server: ScriptedServer
) -> None:
    server.script = lambda seen: answer("slow", "er", pause=1.0 if "brief" in str(seen.body) else 600.0)
    options = ["--worker", f"{server.url},dialect=openai", "--store", "none"]

    def ask(url: str, word: str) -> subprocess.Popen[str]:
        body = json.dumps({"model": "scripted", "stream": True, "messages": [{"role": "user", "content": word}]})
        command = ["curl", "-sSN", "-m", "200", f"{url}/v1/chat/completions", "-d", body]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert asking.stdout is not None
        assert asking.stdout.readline().startswith("data:")
        return asking

    with started(tmp_path, *options) as running:
        brief = ask(running.url, "brief")
        assert running.stop() == 0
        assert brief.communicate(timeout=60)[0].rstrip().endswith("data: [DONE]")
    with started(tmp_path, *options) as running:
        endless = ask(running.url, "endless")
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(1)
        assert running.stop() == 0
        endless.communicate(timeout=60)


def test_running_requests_finish_also_when_the_log_reader_is_gone(tmp_path: Path, server: ScriptedServer) -> None:
    """Ctrl-C on `stoker gateway 2>&1 | tee log` ends the reader first."""
    server.script = lambda seen: answer("slow", "er", pause=1.0)
    fifo = tmp_path / "gateway.log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with started(tmp_path, "--worker", f"{server.url},dialect=openai", "--store", "none") as running:
        body = json.dumps({"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "Hi"}]})
        command = ["curl", "-sSN", "-m", "200", f"{running.url}/v1/chat/completions", "-d", body]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert asking.stdout is not None
        assert asking.stdout.readline().startswith("data:")
        os.close(reader)
        assert running.stop(signal.SIGINT) == 0
        assert asking.communicate(timeout=60)[0].rstrip().endswith("data: [DONE]")


def test_https(tmp_path: Path, server: ScriptedServer) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        *files,
        *subject,
    ]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    options = ["--worker", f"{server.url},dialect=openai", "--store", "none"]
    tls = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    with started(tmp_path, *options, *tls) as running:
        assert running.url.startswith("https://")
        models = json.loads(curl("--cacert", str(tmp_path / "cert.pem"), f"{running.url}/v1/models"))
        assert models["data"][0]["id"] == "scripted"
        assert running.stop() == 0


def test_a_taken_port_is_an_error_that_names_it(tmp_path: Path, server: ScriptedServer) -> None:
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [STOKER, "gateway", "--port", port, "--store", "none"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
