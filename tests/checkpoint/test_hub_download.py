"""Downloads from a Hub: the config is checked before the weights are downloaded, and each failure says what to do.

The official client reads its environment when it is imported, so that each download runs in a process of its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_hub import REPOSITORY, TAG, FakeHub, running
from safetensors.numpy import save
from tiny_configs import LLAMA

from stoker.checkpoint.hub import explain

RESOLVE = """
import sys
from pathlib import Path
from stoker.base.errors import ModelFilesError
from stoker.checkpoint.progress import silent
from stoker.checkpoint.source import resolve_model
try:
    print(resolve_model(sys.argv[1], Path(sys.argv[2]), silent, offline="offline" in sys.argv).path)
except ModelFilesError as error:
    sys.exit(f"{error.code}: {error.message}")
"""


def repository(**changes: Any) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({**LLAMA, **changes}).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": save({"w": np.ones((4, 8), np.float32)}),
        "original/params.json": b"not needed",
        "README.md": b"not needed",
    }


class Downloader:
    """Resolves a Hub model in a process of its own, with its own Hub cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, url: str, *options: str, model: str = REPOSITORY, **environ: str) -> subprocess.CompletedProcess[str]:
        home = {"HF_HOME": str(self.folder / "hf"), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", RESOLVE, model, str(self.folder / "cache"), *options]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**os.environ, **home, **environ}
        )

    def refused(self, url: str, *options: str, model: str = REPOSITORY, **environ: str) -> str:
        done = self.run(url, *options, model=model, **environ)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def downloader(tmp_path: Path) -> Downloader:
    return Downloader(tmp_path)


def test_a_repository_is_downloaded_once_and_then_found_offline(downloader: Downloader) -> None:
    with running(FakeHub(repository())) as hub:
        done = downloader.run(hub.url, model=f"{REPOSITORY}@{TAG}")
        assert done.returncode == 0, done.stderr
    assert sorted(hub.downloaded) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert hub.downloaded[0] == "config.json"
    offline = downloader.run(hub.url, "offline", model=f"{REPOSITORY}@{TAG}")
    assert (offline.returncode, offline.stdout) == (0, done.stdout)
    # The Hub is gone now: the client falls back to its cache.
    assert downloader.run(hub.url, model=f"{REPOSITORY}@{TAG}").stdout == done.stdout


def test_a_cached_repository_with_a_damaged_file_is_refused(downloader: Downloader) -> None:
    with running(FakeHub(repository())) as hub:
        weights = Path(downloader.run(hub.url).stdout.strip()) / "model.safetensors"
    weights.write_bytes(b"cut")
    assert "model.safetensors is not a complete safetensors file" in downloader.refused(hub.url, "offline")


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"architectures": ["BertModel"]}, "unknown_architecture", "BertModel"),
        ({"quantization_config": {"quant_method": "gptq"}}, "unknown_quantisation", "gptq"),
        ({"hidden_act": "gelu"}, "model_files_error", "gelu"),
    ],
)
def test_no_weights_are_downloaded_of_a_model_that_is_not_served(
    downloader: Downloader, changes: dict[str, Any], code: str, said: str
) -> None:
    with running(FakeHub(repository(**changes))) as hub:
        message = downloader.refused(hub.url)
    assert message.startswith(f"{code}: {REPOSITORY} cannot be served: ")
    assert said in message
    assert hub.downloaded == ["config.json"]


def test_a_repository_of_gguf_files_says_how_to_use_one(downloader: Downloader) -> None:
    with running(FakeHub({"model-q4.gguf": b"GGUF"})) as hub:
        message = downloader.refused(hub.url)
    assert "has no config.json" in message
    assert f"hf download {REPOSITORY} FILE.gguf" in message
    assert hub.downloaded == []


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((401, "GatedRepo"), "accept its terms on {url}/org/name, log in with `hf auth login`"),
        ((403, "GatedRepo"), "accept its terms on {url}/org/name, log in with `hf auth login`"),
        ((401, ""), "log in with `hf auth login`|A private repository needs `hf auth login`"),
        ((403, ""), "refused access to org/name (HTTP 403): log in with `hf auth login`"),
        ((404, "RepoNotFound"), "org/name is neither a folder here nor a repository on {url}: check the name"),
        ((400, ""), "answered HTTP 400 for org/name: try again later"),
    ],
)
def test_a_refusal_of_the_hub_says_why_and_what_to_do(
    downloader: Downloader, refusal: tuple[int, str], said: str
) -> None:
    with running(FakeHub({}, refusal)) as hub:
        message = downloader.refused(hub.url)
    assert any(one in message for one in said.format(url=hub.url).split("|")), message


def test_an_unknown_revision_is_named(downloader: Downloader) -> None:
    with running(FakeHub(repository())) as hub:
        message = downloader.refused(hub.url, model=f"{REPOSITORY}@v9")
    assert "org/name@v9: the repository has no branch, tag or commit of this name" in message


def test_a_hub_that_cannot_be_reached_says_so(downloader: Downloader) -> None:
    with running(FakeHub({})) as hub:
        url = hub.url
    message = downloader.refused(url)
    assert f"org/name could not be downloaded from {url}" in message
    assert "refused" in message
    assert "check the network, or download it on another machine (`hf download org/name`)" in message


def test_offline_modes_name_the_setting_that_forbids_the_download(downloader: Downloader) -> None:
    message = downloader.refused("http://127.0.0.1:1", "offline")
    assert "is not in the cache" in message
    assert "--offline forbids a download" in message
    message = downloader.refused("http://127.0.0.1:1", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE=1 forbids a download" in message


def test_a_full_disk_names_the_folder_and_the_free_space(downloader: Downloader, small_disk: Path) -> None:
    files = repository() | {"model.safetensors": save({"w": np.ones((1024, 1024), np.float32)})}
    with running(FakeHub(files)) as hub:
        message = downloader.refused(hub.url, HF_HOME=str(small_disk))
    assert f"the disk is full: org/name is downloaded to {small_disk}/hub" in message
    assert "set HF_HOME to a folder on a larger disk" in message


@pytest.mark.parametrize("error", [ConnectionError("no route"), TimeoutError("no answer")])
def test_an_error_of_the_network_is_quoted(error: Exception) -> None:
    said = f"org/name could not be downloaded .*{type(error).__name__}: {error}.*pass its folder as MODEL"
    assert re.match(said, explain(error, "org/name", offline=False))


def test_a_full_disk_is_found_among_the_causes_of_an_error() -> None:
    error = RuntimeError("download failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert "the disk is full" in explain(error, "org/name", offline=False)
