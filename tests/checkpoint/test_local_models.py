"""`stoker models`: what was pulled is listed, and what was removed is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import REPOSITORY, TAG, FakeHub, running
from test_hub_download import repository
from tiny_gguf import TinyGguf

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.local_models import local_models, remove_model
from stoker.checkpoint.progress import silent


class Machine:
    """Runs `stoker models` with caches of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = "http://127.0.0.1:1"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {
            "HF_HOME": str(self.folder / "hf"),
            "HF_ENDPOINT": self.hub,
            "HF_HUB_OFFLINE": "0",
            "STOKER_CACHE": str(self.folder / "cache"),
        }
        command = [sys.executable, "-m", "stoker.cli.main", "models", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environ})

    def shown(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def test_pulled_models_are_listed_and_removed(tmp_path: Path, gguf_path: Path) -> None:
    machine = Machine(tmp_path)
    assert "There are no models on this machine" in machine.shown("list")
    with running(FakeHub(repository())) as hub:
        machine.hub = hub.url
        machine.shown("pull", REPOSITORY)
    TinyGguf().write(gguf_path)
    machine.shown("pull", str(gguf_path))
    _, hub_line, gguf_line = sorted(machine.shown("list").splitlines(), key=lambda line: line[0] in "ot")
    assert hub_line.split()[:3] == [REPOSITORY, "0.00", "ready"]
    assert gguf_line.startswith("tiny-")
    assert "ready" in gguf_line
    machine.shown("remove", REPOSITORY)
    machine.shown("remove", gguf_line.split()[0])
    assert "There are no models on this machine" in machine.shown("list")
    assert gguf_path.exists()


def test_a_model_of_another_revision_has_its_revision_in_its_name(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with running(FakeHub(repository())) as hub:
        machine.hub = hub.url
        machine.shown("pull", f"{REPOSITORY}@{TAG}")
    assert f"{REPOSITORY}@{TAG}" in machine.shown("list")


def test_an_unknown_model_is_refused_with_the_names_of_all(tmp_path: Path) -> None:
    done = Machine(tmp_path).run("remove", "nothing")
    assert done.returncode == 2
    assert "there is no model 'nothing' on this machine" in done.stderr


def test_an_incomplete_model_is_shown_and_can_be_removed(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.checkpoint.local_models._repositories", list)
    folder = cache_dir / "models" / "broken-0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    [found] = local_models(cache_dir)
    assert (found.name, found.complete) == ("broken-0123", False)
    with pytest.raises(ModelFilesError, match="the models are: broken-0123"):
        remove_model("other", cache_dir, silent)
    remove_model("broken-0123", cache_dir, silent)
    assert local_models(cache_dir) == []
