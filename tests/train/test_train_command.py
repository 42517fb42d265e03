"""`stoker train-draft` as a process: Ctrl-C saves and ends it, kill -9 loses one step, and the result is the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.cli.main import main

QUESTIONS = ("What is a tree?", "Count to ten.", "Name a colour.", "Write a poem.", "Who are you?")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"messages": [{"role": "user", "content": f"{text} {number}"}]}
            for number in range(3) for text in QUESTIONS]  # fmt: skip
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"text": "Once upon a time there was a"}]))
    return file


def arguments(model: Path, data: Path, out: Path) -> list[str]:
    return [
        "train-draft", str(model), "--data", str(data), "--out", str(out), "--device", "cpu", "--threads", "1",
        "--answer-tokens", "12", "--draft-vocab", "200", "--batch-tokens", "128", "--epochs", "3", "--checkpoint-s", "0",
        "--temperature", "0", "--unroll", "2",
    ]  # fmt: skip


def start(words: list[str], checkpoint: Path) -> subprocess.Popen[str]:
    """Start the command, and return after it has replaced its checkpoint."""
    old = checkpoint.stat().st_ino if checkpoint.exists() else None
    process = subprocess.Popen([sys.executable, "-m", "stoker.cli.main", *words], stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 120
    while not checkpoint.exists() or checkpoint.stat().st_ino == old:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    return process


@pytest.mark.slow
def test_a_stopped_and_a_killed_training_end_like_one_that_ran_through(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, checkpoint = arguments(tiny_folder, data, tmp_path / "parts"), tmp_path / "parts.work/checkpoint.safetensors"
    stopped = start(words, checkpoint)
    stopped.send_signal(signal.SIGINT)
    errors = stopped.communicate(timeout=60)[1]
    assert stopped.returncode == 130, errors
    assert "the same command continues" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "parts").exists()
    killed = start(words, checkpoint)
    killed.kill()
    killed.communicate(timeout=60)
    assert main(words) == 0
    assert "tokens per step" in capsys.readouterr().out
    assert main(arguments(tiny_folder, data, tmp_path / "whole")) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    whole = tmp_path / "whole.work/checkpoint.safetensors"
    assert checkpoint.read_bytes() == whole.read_bytes()


def test_bad_data_is_one_line_on_stderr(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.jsonl"
    for row, message in (
        ({"messages": [{"role": "user"}]}, "data.jsonl:1: messages[0] is an empty prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "data.jsonl:1: "),
        ({"nothing": 1}, "data.jsonl:1: no prompt"),
    ):
        file.write_text(json.dumps(row))
        assert main(arguments(tiny_folder, file, tmp_path / "out")) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert main([*arguments(tiny_folder, file, tmp_path / "out"), "--draft-vocab", "0"]) == 2
    assert "--draft-vocab" in capsys.readouterr().err
    for flags in (["--out", "x"], ["--data", str(file)]):
        assert main(["train-draft", str(tiny_folder), *flags]) == 2
        assert "is missing" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["data.jsonl"]
