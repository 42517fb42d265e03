"""Check a model folder in Hugging Face format before anything is loaded from it. Errors name the missing or damaged file."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.served import check_served
from stoker.checkpoint.weight_files import stored_tensors, tokenizer_file, weight_files


def check_folder(folder: Path) -> None:
    """Raise ModelFilesError unless the folder has a config, a tokenizer, and all weight files in full length."""
    config, tokenizer = folder / "config.json", tokenizer_file(folder)
    _check_json(config)
    if not has_all_files(folder):
        # First say if the model cannot be served anyway: then there is no point in completing the folder.
        check_served(config, str(folder))
    if not tokenizer.is_file():
        raise ModelFilesError(
            f"{tokenizer} is missing. If the model has a tokenizer file of another kind, load it with transformers' "
            "AutoTokenizer and write tokenizer.json into the folder with save_pretrained()"
        )
    if tokenizer.suffix == ".json":
        _check_json(tokenizer)
    stored_tensors(folder)


def has_all_files(folder: Path) -> bool:
    """Return True if no file of the model is missing. The content of the files is not checked."""
    weights = weight_files(folder)
    return bool(weights) and all(file.is_file() for file in (tokenizer_file(folder), *weights))


def _check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object: download it again")
