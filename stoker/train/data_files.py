"""Reads conversations and texts from JSON lines. A bad line is an error that names the file and the line.

| fields of a line | meaning |
|---|---|
| `messages` | a conversation in OpenAI's form; `tools` may stand beside it |
| `turns` | the user's messages of a conversation; the first one is the prompt |
| `text` | plain text, of which the beginning is the prompt |
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError

_FIELDS = ("messages", "turns", "text")
_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One line of a data file. It has messages that end before an answer, or text."""

    where: str  # FILE:LINE, for errors
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str = ""


def read_data_files(paths: Sequence[Path], seed: int) -> list[TrainingPrompt]:
    """Return the prompts of all files, one for each line. Raises ConfigError for the first line that has none."""
    found = [source for path in paths for source in _read_file(path, seed)]
    if not found:
        raise ConfigError(f"--data: no prompts in {', '.join(map(str, paths)) or 'no file'}; give files of JSON lines")
    return found


def _read_file(path: Path, seed: int) -> Iterator[TrainingPrompt]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > _MAX_LINE_BYTES:
                    raise ConfigError(f"{path}:{number}: the line has more than {_MAX_LINE_BYTES >> 20} MiB")
                if line.strip():
                    yield _parse_line(line, f"{path}:{number}", seed)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"--data: {path} cannot be read after line {number}: {reason}") from error


def _parse_line(line: bytes, where: str, seed: int) -> TrainingPrompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); correct or remove the line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a JSON object is expected, found {type(row).__name__}")
    given = next((name for name in _FIELDS if row.get(name) is not None), None)
    if given == "messages":
        return TrainingPrompt(where, _before_an_answer(row["messages"], where, seed), _tools(row, where))
    if given == "turns":
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
            raise ConfigError(f"{where}: 'turns' must be a list whose first item is a text that is not empty")
        return TrainingPrompt(where, [{"role": "user", "content": turns[0]}])
    if given == "text":
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise ConfigError(f"{where}: 'text' is empty or not a string")
        return TrainingPrompt(where, text=row["text"])
    raise ConfigError(f"{where}: no prompt; one of the fields {', '.join(map(repr, _FIELDS))} is needed")


def _before_an_answer(messages: Any, where: str, seed: int) -> list[dict[str, Any]]:
    """Return the messages before one of the assistant's. Seed and line choose which, so that long conversations do not
    count more than short ones."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: 'messages' must be a list that is not empty")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: messages[{place}] is not an object with a role")
        content = message.get("content")
        if message["role"] == "user" and (not content or (isinstance(content, str) and not content.strip())):
            raise ConfigError(f"{where}: messages[{place}] is an empty prompt; correct or remove the line")
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place]
    if not answers:
        if messages[-1]["role"] == "assistant":
            raise ConfigError(f"{where}: 'messages' has an answer only, and no prompt")
        return messages
    return messages[: random.Random(f"{seed} {where.rpartition(':')[2]}").choice(answers)]


def _tools(row: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a line. Some data sets have the name of a list here instead, which is not known."""
    tools = row.get("tools")
    if tools is None or isinstance(tools, str):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: 'tools' must be a list of objects")
    return tools or None
