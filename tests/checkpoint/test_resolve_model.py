"""All forms of MODEL, and damaged folders: the error names the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_configs import LLAMA
from tiny_gguf import TinyGguf

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.progress import silent
from stoker.checkpoint.source import default_cache_dir, resolve_model
from stoker.checkpoint.weight_files import INDEX


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two shards."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    places = {}
    for number in (1, 2):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": np.ones((4, 8), np.float32)}, folder / shard)
        places[f"w{number}"] = shard
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


def test_a_complete_folder_is_used_as_it_is(folder: Path, cache_dir: Path) -> None:
    found = resolve_model(str(folder), cache_dir, silent)
    assert (found.path, found.name) == (folder, "my-model")
    assert not cache_dir.exists()


def test_a_folder_with_a_single_file_is_used(folder: Path, cache_dir: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    assert resolve_model(str(folder), cache_dir, silent).path == folder


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def _break(folder: Path, how: str) -> None:
    second = folder / "model-00002-of-00002.safetensors"
    first = folder / "model-00001-of-00002.safetensors"
    if how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif how == "bad config":
        (folder / "config.json").write_text("{")
    elif how == "list config":
        (folder / "config.json").write_text("[]")
    elif how == "missing shard":
        second.unlink()
    elif how == "cut data":
        _cut(second, -1)
    elif how == "cut head":
        _cut(second, 20)
    elif how == "empty":
        _cut(second, 0)
    elif how == "too long":
        second.write_bytes(second.read_bytes() + b"x")
    elif how == "bad head":
        second.write_bytes(struct.pack("<Q", 4) + b"nope")
    elif how == "web page":
        second.write_bytes(b"<html>" * 100)
    elif how == "other shard":
        second.write_bytes(first.read_bytes())
    elif how == "doubled tensor":
        save_file({name: np.ones(3, np.float32) for name in ("w1", "w2")}, second)
    elif how == "no map":
        (folder / INDEX).write_text("{}")
    elif how == "bad map":
        (folder / INDEX).write_text('{"weight_map": {"w1": ["a", "b"]}}')
    elif how == "bad dtype":
        second.write_bytes(second.read_bytes().replace(b"F32", b"F99"))
    elif how == "no weights":
        (folder / INDEX).unlink()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no tokenizer", r"tokenizer\.json is missing"),
        ("bad config", r"config\.json is not valid JSON"),
        ("list config", r"config\.json does not contain a JSON object"),
        ("missing shard", r"1 of the 2 files .* missing: model-00002-of-00002\.safetensors"),
        ("cut data", r"model-00002.* is not a complete .*it has \d+ bytes, its header says \d+"),
        ("cut head", r"model-00002.* is not a complete .*a header of \d+ bytes in a file of 20"),
        ("empty", r"model-00002.* is not a complete .*it has only 0 bytes"),
        ("too long", r"model-00002.* is not a complete .*it has \d+ bytes, its header says \d+"),
        ("bad head", r"model-00002.* is not a complete .*Expecting value"),
        ("web page", r"model-00002.* is not a complete .*a header of \d+ bytes in a file of 600"),
        ("other shard", r"model-00002.* has no tensor 'w2'"),
        ("doubled tensor", r"the tensor 'w1' is in model-00001-of-00002\.safetensors and in model-00002-of-00002"),
        ("no map", r"index\.json: its weight_map cannot be read"),
        ("bad map", r"index\.json: its weight_map"),
        ("bad dtype", r"model-00002.*'w2'.*F99"),
        ("no weights", r"neither model\.safetensors nor"),
    ],
)
def test_a_broken_folder_is_refused_with_the_files_name(folder: Path, cache_dir: Path, how: str, said: str) -> None:
    _break(folder, how)
    with pytest.raises(ModelFilesError, match=said):
        resolve_model(str(folder), cache_dir, silent)


def test_a_folder_with_one_gguf_is_converted(gguf_path: Path, cache_dir: Path) -> None:
    TinyGguf().write(gguf_path)
    assert resolve_model(str(gguf_path.parent), cache_dir, silent) == resolve_model(str(gguf_path), cache_dir, silent)


def test_an_unserved_family_is_reported_before_missing_files(folder: Path, cache_dir: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["MambaForCausalLM"]}))
    (folder / "tokenizer.json").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"MambaForCausalLM.*LlamaForCausalLM") as refused:
        resolve_model(str(folder), cache_dir, silent)
    assert refused.value.code == "unknown_architecture"


def test_a_folder_with_two_ggufs_is_refused_with_their_names(gguf_path: Path, cache_dir: Path) -> None:
    TinyGguf().write(gguf_path)
    TinyGguf().write(gguf_path.with_name("other.gguf"))
    with pytest.raises(ModelFilesError, match=r"2 GGUF files \(other\.gguf, tiny\.gguf\)"):
        resolve_model(str(gguf_path.parent), cache_dir, silent)


def test_an_empty_folder_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"neither config\.json nor a \.gguf"):
        resolve_model(str(tmp_path), cache_dir, silent)


@pytest.mark.parametrize(
    "model", ["no-such-thing", "a/b/c", "./missing/model", "org/model.gguf", "", "org/name@", "long" * 100]
)
def test_any_other_model_argument_explains_what_it_can_be(
    model: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache_dir.parent)
    with pytest.raises(ModelFilesError, match=r"org/name@revision.*SmolLM2-135M-Instruct"):
        resolve_model(model, cache_dir, silent)


def test_the_cache_folder_follows_the_environment() -> None:
    assert default_cache_dir({"STOKER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert default_cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/stoker")
    assert default_cache_dir({}) == Path.home() / ".cache" / "stoker"
