"""Read the small JSON files of a model's folder, and say which one is at fault.

It knows file names and how they may be missing or corrupt; it refuses to know what a tokenizer or a template is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.base.errors import ModelFilesError


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
