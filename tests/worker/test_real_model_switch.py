"""A running worker is given another model: requests that run finish, a bad model changes nothing, and gateways see a new worker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from real import COMPLETIONS, STOKER, RealServer, is_alive, serving, wait_for
from safetensors.torch import load_file, save_file

SECRET = "a secret of the fleet that is long enough"
MODEL_PATH = "/stoker/model"
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "seed": 1}
ENDLESS = LONG | {"max_tokens": 6000}  # runs until its client leaves


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def other_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    save_file(
        {name: 0.5 * torch.randn(values.shape, generator=generator) for name, values in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@pytest.fixture(scope="module")
def server(tiny_folder: Path, secret_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("log") / "log"
    options = ("--threads", "1", "--dtype", "float64", "--kv-blocks", "500", "--secret-file", str(secret_file))
    with serving(tiny_folder, log, *options) as server:
        server.secret = SECRET
        yield server


def answer(server: RealServer) -> str:
    return server.complete("Hello", max_tokens=20, seed=3, ignore_eos=True).text


def worker(server: RealServer) -> dict[str, Any]:
    return server.send("/stoker/worker").json  # type: ignore[no-any-return]


def test_a_worker_serves_another_model_after_its_requests_have_finished(
    server: RealServer, tiny_folder: Path, other_folder: Path, secret_file: Path
) -> None:
    first, before = answer(server), worker(server)
    running = server.stream(COMPLETIONS, {"model": server.model} | LONG)
    wait_for(lambda: len(running.events) > 2)
    command = [STOKER, "model", server.url, str(other_folder), "--secret-file", str(secret_file)]
    printed = subprocess.run(
        [*command, "--served-name", "new"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "serves new after" in printed.stdout
    running.wait_end()
    assert running.is_done, "the request that ran has its whole answer"

    server.model = "new"
    second, after = answer(server), worker(server)
    assert second != first
    assert after["models"] == ["new"]
    assert (after["fingerprint"], after["worker_id"]) != (before["fingerprint"], before["worker_id"])
    assert server.send(COMPLETIONS, {"model": before["models"][0], "prompt": "x"}).status == 404
    assert 'stoker_model_info{model="new"} 1.0' in server.send("/metrics").body.decode()

    running = server.stream(COMPLETIONS, {"model": server.model} | ENDLESS)
    assert server.send(MODEL_PATH, {"model": str(tiny_folder), "drain_s": 0}).status == 200
    running.wait_end()
    assert running.last_error["code"] == "engine_died", "this switch waits for no request"
    server.model = tiny_folder.name
    assert answer(server) == first


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "/no/such/folder"}, "model"),
        ({"model": ""}, "model"),
        ({"model": 7}, "model"),
        ({}, "model"),
        ({"model": "x", "names": ["y"]}, "names"),
        ({"model": "x", "drain_s": -1}, "drain_s"),
    ],
)
def test_a_bad_request_names_the_field_and_changes_nothing(server: RealServer, body: Any, param: str) -> None:
    first, before = answer(server), worker(server)
    refused = server.send(MODEL_PATH, body)
    assert (refused.status, refused.error["param"]) == (400, param), refused.body
    assert (answer(server), worker(server)) == (first, before)


def test_after_a_model_that_cannot_be_loaded_the_old_one_is_served(
    server: RealServer, other_folder: Path, tmp_path: Path
) -> None:
    first = answer(server)
    broken = tmp_path / "broken"
    shutil.copytree(other_folder, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    refused = server.send(MODEL_PATH, {"model": str(broken)})
    assert (refused.status, refused.error["param"], refused.error["code"]) == (400, "model", "model_files_error")
    assert '"model_switch_failed"' in server.log
    wait_for(lambda: server.is_ready, 120)
    assert answer(server) == first


def test_only_the_fleet_may_switch_the_model(server: RealServer, tiny_folder: Path, other_folder: Path) -> None:
    server.secret = None
    try:
        assert server.send(MODEL_PATH, {"model": str(other_folder)}).status == 401
    finally:
        server.secret = SECRET
    assert json.loads(server.send("/v1/models").body)["data"][0]["id"] == tiny_folder.name


def switch_command(server: RealServer, folder: Path, secret_file: Path) -> subprocess.Popen[str]:
    command = [STOKER, "model", server.url, str(folder), "--secret-file", str(secret_file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_reader(pipe: Path) -> int:
    """Wait until a process reads the named pipe, and return a file descriptor that keeps it waiting."""
    found: list[int] = []

    def is_read() -> bool:
        with suppress(OSError):
            found.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(found)

    wait_for(is_read)
    return found[0]


def test_ctrl_c_during_the_drain_cancels_the_switch(server: RealServer, other_folder: Path, secret_file: Path) -> None:
    running = server.stream(COMPLETIONS, {"model": server.model} | ENDLESS)
    command = switch_command(server, other_folder, secret_file)
    wait_for(lambda: not server.is_ready)
    refused = server.send(MODEL_PATH, {"model": str(other_folder)})
    assert (refused.status, refused.error["code"]) == (503, "model_switching"), "one switch at a time"
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=60)
    assert "Traceback" not in said
    wait_for(lambda: server.is_ready)
    assert '"model_switch_cancelled"' in server.log
    assert not running.is_done
    running.leave()
    assert worker(server)["models"] == [server.model]
    answer(server)


def test_sigterm_ends_a_worker_that_drains_for_a_switch(
    server: RealServer, tiny_folder: Path, other_folder: Path, secret_file: Path, tmp_path: Path
) -> None:
    hanging = tmp_path / "hanging"
    shutil.copytree(tiny_folder, hanging)
    (hanging / "tokenizer_config.json").unlink(missing_ok=True)
    os.mkfifo(hanging / "tokenizer_config.json")  # reading it never ends, like a download that hangs
    hangs = switch_command(server, hanging, secret_file)
    writer = wait_for_reader(hanging / "tokenizer_config.json")
    hangs.send_signal(signal.SIGINT)
    hangs.communicate(timeout=60)

    engine = server.engine_pid
    running = server.stream(COMPLETIONS, {"model": server.model} | LONG)
    command = switch_command(server, other_folder, secret_file)
    wait_for(lambda: not server.is_ready)
    server.process.send_signal(signal.SIGTERM)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 2
    assert "is stopping and keeps its model" in said
    running.wait_end()
    assert running.is_done, "the request that ran has its whole answer"
    assert server.process.wait(60) == 0, "it waits for no thread of the switch that was cancelled"
    os.close(writer)
    assert not is_alive(engine)
    assert '"model_switched"' not in server.log.rpartition('"model_switching"')[2]
    assert "Traceback" not in server.log
