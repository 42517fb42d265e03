"""Check a model folder in Hugging Face format before anything is loaded from it. Errors name the missing or damaged file."""

from __future__ import annotations

from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.served import check_served
from stoker.checkpoint.weight_files import read_json_object, stored_tensors, tokenizer_file, weight_files


def check_folder(folder: Path) -> None:
    """Raise ModelFilesError unless the folder has a config, a tokenizer, and all weight files in full length."""
    config, tokenizer = folder / "config.json", tokenizer_file(folder)
    read_json_object(config)
    if not has_all_files(folder):
        # First say if the model cannot be served anyway: then there is no point in completing the folder.
        check_served(config, str(folder))
    if not tokenizer.is_file():
        raise ModelFilesError(
            f"{tokenizer} is missing. If the model has a tokenizer file of another kind, load it with transformers' "
            "AutoTokenizer and write tokenizer.json into the folder with save_pretrained()"
        )
    if tokenizer.suffix == ".json":
        read_json_object(tokenizer)
    stored_tensors(folder)


def has_all_files(folder: Path) -> bool:
    """Return True if no file of the model is missing. The content of the files is not checked."""
    weights = weight_files(folder)
    return bool(weights) and all(file.is_file() for file in (tokenizer_file(folder), *weights))
