"""`stoker keys`: keys are created, listed and revoked in the store, and running gateways follow."""

from __future__ import annotations

import json
import sqlite3
import time
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from scripted_server import ScriptedServer
from test_gateway_cli import curl, started

from stoker.cli.main import main
from stoker.gateway.key_settings import KeySettings


def keys(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["keys", *words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_key_is_shown_once_and_only_its_hash_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ["--store", str(tmp_path / "store.db")]
    limits = ["--requests-per-minute", "600", "--budget", "5", "--budget-period", "day"]
    status, key, _ = keys(capsys, "create", "alice", "--tenant", "team-a", *limits, *store)
    assert status == 0
    assert key.startswith("sk-stoker-")
    for file in tmp_path.iterdir():
        assert key.strip().encode() not in file.read_bytes()
    _, shown, _ = keys(capsys, "list", "--json", *store)
    (entry,) = json.loads(shown)
    assert (entry["name"], entry["tenant"], entry["requests_per_minute"], entry["budget_period"]) == (
        *("alice", "team-a", 600, "day"),
    )
    assert "sha256" not in entry
    assert "requests_per_minute=600.0 budget=5.0 budget_period=day" in keys(capsys, "list", *store)[1]
    for name, words in (("alice", "choose another name"), ("a b", "key.name='a b'")):
        status, shown, error = keys(capsys, "create", name, *store)
        assert (status, shown) == (2, "")
        assert words in error
    assert keys(capsys, "revoke", "alice", *store)[0] == 0
    assert "no key 'alice'" in keys(capsys, "revoke", "alice", *store)[2]
    assert "choose another name" in keys(capsys, "create", "alice", *store)[2]
    with closing(sqlite3.connect(tmp_path / "store.db")) as base:
        actions = [row[0] for row in base.execute("SELECT action FROM audit ORDER BY id")]
    assert actions == ["key_created", "key_revoked"]


def test_a_user_without_a_name_can_create_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)  # as in a container with any user
    assert keys(capsys, "create", "alice", "--store", str(tmp_path / "store.db"))[0] == 0
    with closing(sqlite3.connect(tmp_path / "store.db")) as base:
        ((actor,),) = base.execute("SELECT actor FROM audit")
    assert actor.startswith("uid-54321@")


def test_a_key_for_the_file_is_printed_and_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = keys(
        capsys, "create", "alice", "--print", "--tenant", "team-a", "--store", str(tmp_path / "s.db")
    )
    key, _, lines = shown.partition("\n")
    (entry,) = tomllib.loads(lines)["key"]
    settings = KeySettings(**entry)
    assert (status, settings.name, settings.tenant) == (0, "alice", "team-a")
    assert key not in lines
    assert list(tmp_path.iterdir()) == []


def test_running_gateways_follow_the_keys_of_the_store(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", str(tmp_path / "store.db")]
    with started(tmp_path, "--worker", f"{server.url},dialect=openai", *store) as running:

        def status(key: str) -> str:
            header = ("-H", f"Authorization: Bearer {key.strip()}") if key else ()
            return curl(f"{running.url}/v1/models", "-o", "/dev/null", "-w", "%{http_code}", *header)

        def becomes(key: str, expected: str) -> None:
            deadline_s = time.monotonic() + 10
            while status(key) != expected:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)

        assert status("") == "200"
        alice, bob = (keys(capsys, "create", name, *store)[1] for name in ("alice", "bob"))
        becomes("", "401")
        becomes(bob, "200")
        assert status(alice) == "200"
        keys(capsys, "revoke", "alice", *store)
        becomes(alice, "401")
        assert status(bob) == "200"
        keys(capsys, "revoke", "bob", *store)
        becomes(bob, "401")
        assert status("") == "401"  # without any valid key left, it does not become open again


@pytest.mark.parametrize("words", [["list"], ["revoke", "alice"]])
def test_a_store_that_does_not_exist_is_not_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    status, shown, error = keys(capsys, *words, "--store", str(tmp_path / "typo.db"))
    assert (status, shown) == (2, "")
    assert f"store={tmp_path / 'typo.db'}: there is no such file" in error
    assert list(tmp_path.iterdir()) == []


def test_a_budget_without_prices_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, store = tmp_path / "gateway.toml", ["--store", str(tmp_path / "store.db")]
    assert "none: a model without a [[price]]" in keys(capsys, "create", "a", "--budget", "5", *store)[2]
    assert "[[price]]" not in keys(capsys, "create", "b", *store)[2]
    config.write_text('[[price]]\nmodel = "*"\ninput = 1\noutput = 2\n')
    assert "[[price]]" not in keys(capsys, "create", "c", "--session-budget", "5", "--config", str(config), *store)[2]
