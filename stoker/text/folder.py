"""Read the small JSON files of a model's folder, and say which one is at fault.

It knows file names and how they may be missing or corrupt; it refuses to know what a tokenizer or a template is.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from stoker.base.errors import ModelFilesError

_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def text_files(folder: Path) -> dict[str, str]:
    """All that a tokenizer and a chat template are read from: in another folder, they are the same ones."""
    names = [
        *_TEXT_FILES,
        *(f"additional_chat_templates/{p.name}" for p in folder.glob("additional_chat_templates/*.jinja")),
    ]
    texts = ((name, read_text(folder / name)) for name in names)
    return {name: text for name, text in texts if text is not None}


def text_digest(files: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(files.items()):
        for part in (name.encode(), text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def read_text(path: Path) -> str | None:
    """The file's text, or None where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as broken:
        raise ModelFilesError(
            f"{path} cannot be read as UTF-8 text: {broken}; fetch the model's files again"
        ) from broken


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object; an absent file is an empty object."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as broken:
        raise ModelFilesError(f"{path} is not valid JSON ({broken}); fetch the model's files again") from broken
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def token_text(value: Any) -> str | None:
    """A token in a configuration file is its text, or an object with its text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def token_ids(value: Any) -> list[int]:
    """`eos_token_id` is an id, a list of ids, or null."""
    if isinstance(value, list):
        return [entry for entry in value if isinstance(entry, int)]
    return [value] if isinstance(value, int) else []
