"""Check an HF folder before anything is loaded from it: each file that is missing or cut off is named at once."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.weight_files import stored_tensors


def check_folder(folder: Path) -> None:
    """Raise ModelFilesError unless the folder has a config, a tokenizer, and every shard of its weights, whole."""
    _check_json(folder / "config.json")
    if not (folder / "tokenizer.json").is_file():
        raise ModelFilesError(
            f"{folder / 'tokenizer.json'} is missing. Where the model has only another kind of tokenizer file, load it "
            "with transformers' AutoTokenizer and save_pretrained() it into the folder"
        )
    _check_json(folder / "tokenizer.json")
    stored_tensors(folder)


def _check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object: download it again")
