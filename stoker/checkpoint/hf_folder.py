"""Check an HF folder before anything is loaded from it: each file that is missing or cut off is named at once."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from stoker.base.errors import ModelFilesError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEAD_BYTES = 100_000_000  # the format's own limit


def check_folder(folder: Path) -> None:
    """Raise ModelFilesError unless the folder has a config, a tokenizer, and every shard of its weights, whole."""
    _read_json(folder / "config.json")
    if not (folder / "tokenizer.json").is_file():
        raise ModelFilesError(
            f"{folder / 'tokenizer.json'} is missing. Where the model has only another kind of tokenizer file, load it "
            "with transformers' AutoTokenizer and save_pretrained() it into the folder"
        )
    _read_json(folder / "tokenizer.json")
    if (folder / INDEX).is_file():
        _check_shards(folder)
    elif (folder / SINGLE).is_file():
        _tensor_names(folder / SINGLE)
    else:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
        found = f" (it has {', '.join(others[:3])}, which Stoker does not read)" if others else ""
        raise ModelFilesError(f"{folder} has neither {SINGLE} nor {INDEX}{found}: download the model's safetensors")


def _check_shards(folder: Path) -> None:
    index = folder / INDEX
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(shard, str) for shard in places.values()):
        raise ModelFilesError(f"{index} has no weight_map from tensors to files: download it again")
    shards = sorted(set(places.values()))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ModelFilesError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that {INDEX} names: {', '.join(missing[:5])}. "
            "Download them into it"
        )
    for shard in shards:
        names = _tensor_names(folder / shard)
        if lost := [tensor for tensor, its_shard in places.items() if its_shard == shard and tensor not in names]:
            raise ModelFilesError(
                f"{folder / shard} has no tensor {lost[0]}, where {INDEX} says it is: the two are of different "
                "versions; download the model again"
            )


def _tensor_names(path: Path) -> set[str]:
    """The names in a safetensors file whose size is what its head says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        head_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else _MAX_HEAD_BYTES + 1
        if head_bytes > _MAX_HEAD_BYTES or 8 + head_bytes > size:
            raise _broken(path, f"its {size} bytes hold no whole head")
        text = file.read(head_bytes)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _broken(path, f"its head cannot be read: {error!r}") from error
    expected = 8 + head_bytes + max(ends, default=0)
    if size != expected:
        raise _broken(path, f"it has {size} bytes, and its head says {expected}")
    return set(entries)


def _broken(path: Path, what: str) -> ModelFilesError:
    return ModelFilesError(f"{path} is cut off or damaged: {what}. Download it again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object: download it again")
    return content
