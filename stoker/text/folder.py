"""Read the small text and JSON files of a model folder. Errors name the file.

This module does not know what a tokenizer or a chat template is.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from stoker.base.errors import ModelFilesError

_TEXT_FILES = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def text_files(folder: Path) -> dict[str, str]:
    """Return the content, by file name, of all files that define the tokenizer and the chat template."""
    names = [
        *_TEXT_FILES,
        *(f"additional_chat_templates/{p.name}" for p in folder.glob("additional_chat_templates/*.jinja")),
    ]
    texts = ((name, read_text(folder / name)) for name in names)
    return {name: text for name, text in texts if text is not None}


def text_digest(files: dict[str, str]) -> str:
    """Return a hash of these files, which identifies a tokenizer with its chat template."""
    digest = hashlib.sha256()
    for name, text in sorted(files.items()):
        for part in (name.encode(), text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def read_text(path: Path) -> str | None:
    """Return the file's text, or None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as broken:
        raise ModelFilesError(f"{path} cannot be read as UTF-8 text ({broken}): download the model again") from broken


def read_object(path: Path) -> dict[str, Any]:
    """Return the file's JSON object, or {} if there is no such file."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as broken:
        raise ModelFilesError(f"{path} is not valid JSON ({broken}): download the model again") from broken
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def token_text(value: Any) -> str | None:
    """Return the text of a token in a configuration file, where it is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def token_ids(value: Any) -> list[int]:
    """Return the ids in a field such as `eos_token_id`, which is an id, a list of ids, or null."""
    if isinstance(value, list):
        return [entry for entry in value if isinstance(entry, int)]
    return [value] if isinstance(value, int) else []
