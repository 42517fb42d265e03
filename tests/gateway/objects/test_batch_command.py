"""`stoker batch` against a gateway with a store: submit, progress, download, Ctrl-C and back again."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path

import pytest
from response_worker import stored_world
from test_batches import FakeChat, line
from waiting import LONG_S, until
from world import World

from stoker.cli.main import main


async def batch(world: World, *words: str) -> int:
    return await asyncio.to_thread(main, ["batch", *words, "--url", f"http://127.0.0.1:{world.server.port}"])


async def test_results_are_downloaded_and_errors_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        good, mixed, wrong = (tmp_path / name for name in ("good.jsonl", "mixed.jsonl", "wrong.jsonl"))
        good.write_text("\n".join(line(f"id-{i}", f"line {i}") for i in range(20)))
        mixed.write_text("\n".join([line("a", "line"), line("b", "bad")]))
        wrong.write_text("\n".join([line("a", "line"), "{not json"]))
        assert await batch(world, str(good)) == 0
        shown = capsys.readouterr()
        assert shown.out.strip() == f"{good}.results"
        assert "completed: 20 of 20 requests answered, 0 failed, 60 input and 40 output tokens" in shown.err
        results = [json.loads(one) for one in (tmp_path / "good.jsonl.results").read_text().splitlines()]
        assert [one["custom_id"] for one in results] == [f"id-{i}" for i in range(20)]
        assert await batch(world, str(good)) == 2
        assert "exists" in capsys.readouterr().err
        assert await batch(world, str(mixed), "--output", str(tmp_path / "out")) == 1
        assert json.loads((tmp_path / "out.errors").read_text())["custom_id"] == "b"
        assert await batch(world, str(wrong)) == 1
        assert "line 2: The line is not valid JSON." in capsys.readouterr().err
        assert not (tmp_path / "out.part").exists()


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", [], "has no requests"),
        ("\n{}", [], "line 2: not a request"),
        ("[1]", [], "line 1: not a request"),
        ('{"url": "/v1/images"}', [], "Invalid value for 'endpoint'"),
        ('{"url": "/v1/chat/completions"}', ["--window", "9y"], "Invalid value for 'completion_window'"),
        ('{"url": "/v1/chat/completions"}', ["--cancel"], "--cancel needs the id of a batch"),
    ],
)
async def test_a_wrong_file_or_option_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], message: str
) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        (tmp_path / "in").write_text(text)
        assert await batch(world, str(tmp_path / "in"), *words) == 2
        assert message in capsys.readouterr().err
        listed = await world.client.send(b"GET", b"/v1/files", [], b"", connect_s=LONG_S, head_s=LONG_S)
        assert json.loads(await listed.read(1 << 20))["data"] == [], "the uploaded file stays"


async def test_a_file_or_batch_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        assert await batch(world, str(tmp_path / "missing")) == 2
        assert "missing: No such file" in capsys.readouterr().err
        assert await batch(world, "batch_" + "0" * 32) == 2
        assert "No batch with id" in capsys.readouterr().err


async def test_ctrl_c_leaves_the_batch_running_and_says_how_to_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        file = tmp_path / "in.jsonl"
        file.write_text("\n".join(line(f"id-{i}", f"line {i}") for i in range(4)))
        url = f"http://127.0.0.1:{world.server.port}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stoker.cli.main", "batch", str(file), "--url", url),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        while b"running" not in await process.stderr.readline():
            assert not process.stderr.at_eof()
        process.send_signal(signal.SIGINT)
        told = (await process.stderr.read()).decode()
        assert await process.wait() == 130
        found = re.search(r"stoker batch (batch_\w+) --url (\S+) --output (\S+)", told)
        assert found, told
        await until(lambda: world.workers["w"].num_running == 4)
        assert script.gate is not None
        script.gate.set()
        assert await batch(world, found[1], "--output", found[3]) == 0
        assert len((tmp_path / "in.jsonl.results").read_text().splitlines()) == 4


async def test_a_batch_is_stopped_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        (tmp_path / "in").write_text(line("a", "line"))
        assert await batch(world, str(tmp_path / "in"), "--no-wait") == 0
        batch_id = capsys.readouterr().out.strip()
        await until(lambda: world.workers["w"].num_running == 1)
        assert await batch(world, batch_id, "--cancel", "--output", str(tmp_path / "out")) == 1
        assert "cancelled: 0 of 1 requests answered" in capsys.readouterr().err
        assert json.loads((tmp_path / "out.errors").read_text())["error"]["code"] == "batch_cancelled"
