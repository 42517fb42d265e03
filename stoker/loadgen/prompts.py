"""Prompt sets: public ones from a data folder, ShareGPT files, and generated ones of a given length."""

from __future__ import annotations

import gzip
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import ConfigError
from stoker.loadgen.session import Blocks, FollowUp, LoadSession, Message, Messages, TokenRange, Turn

# `turns` are the user's messages; the server's own answers are inserted between them.
PROMPT_FILES = {
    "arena": "prompts/arena.jsonl.gz",
    "gsm8k": "prompts/gsm8k.jsonl.gz",
    "humaneval": "prompts/humaneval.jsonl.gz",
    "mtbench": "prompts/mtbench.jsonl.gz",
    "specbench": "prompts/specbench.jsonl.gz",
}
# `messages` are whole agent conversations; their recorded answers are resent, so prefixes repeat.
CONVERSATION_FILES = {
    "mint": "agentic/mint_gpt4.jsonl.gz",
    "sweagent": "agentic/sweagent_demos.jsonl.gz",
    "tau": "agentic/tau_airline_gpt4o.jsonl.gz",
}
TOOLS_FILE = "tools/tau_tools.json"
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

# Short, common and one token each in the usual vocabularies, so that a prompt of n words has about n tokens.
_COMMON = """
    the of and to in is you that it he was for on are as with his they at be this have from or one had by word but
    not what all were we when your can said there use an each which she do how their if will up other about out many
    then them these so some her would make like him into time has look two more write go see number no way could
    people my than first water been call who oil its now find long down day did get come made may part over new
    sound take only little work know place year live me back give most very after thing our just name good man think
"""
WORDS = tuple(_COMMON.split())

_UNREADABLE = (OSError, EOFError, zlib.error)  # including truncated files and files that are not gzip


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the objects of a JSON Lines file, gzipped or not."""
    return (row for _, row in numbered_lines(path))


def numbered_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the line number and the object of each line of a JSON Lines file, gzipped or not. Empty lines are left out."""
    if not os.path.isfile(path):
        raise ConfigError(f"no file {path}; name the data folder with --data-dir")
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _decoded(line, f"{path}, line {number}")
    except _UNREADABLE as wrong:
        raise ConfigError(f"{path}: cannot be read: {wrong}") from wrong


def read_json(path: Path) -> Any:
    if not os.path.isfile(path):
        raise ConfigError(f"no file {path}")
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
    except _UNREADABLE as wrong:
        raise ConfigError(f"{path}: cannot be read: {wrong}") from wrong
    return _decoded(text, str(path))


def _decoded(text: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise ConfigError(f"{where}: {wrong}") from wrong


def prompt_set(path: Path) -> list[LoadSession]:
    sessions = []
    for row in read_lines(path):
        users = row["turns"]
        turns = [Turn(FollowUp(users[: count + 1]), session=row["id"]) for count in range(len(users))]
        sessions.append(LoadSession(turns))
    return sessions


def conversation_set(path: Path, tools_path: Path, flatten_tools: bool) -> list[LoadSession]:
    sessions = []
    tools_by_name: dict[str, list[dict[str, Any]]] = {}
    for row in read_lines(path):
        messages = [_openai_message(message) for message in row["messages"]]
        tools: Sequence[dict[str, Any]] = ()
        if flatten_tools:
            messages = [_plain_message(message) for message in messages]
        elif "tools" in row:
            tools_by_name = tools_by_name or read_json(tools_path)
            tools = tools_by_name[row["tools"]]
        sessions.append(replay(messages, row["id"], tools))
    return sessions


def sharegpt_set(path: Path) -> list[LoadSession]:
    sessions = []
    for index, row in enumerate(read_json(path)):
        messages: list[Message] = [
            {"role": SHAREGPT_ROLES[part["from"]], "content": part["value"]}
            for part in row.get("conversations", row.get("conversation", ()))
            if part.get("from") in SHAREGPT_ROLES
        ]
        session = replay(messages, str(row.get("id", index)), ())
        if session.turns:
            sessions.append(session)
    if not sessions:
        raise ConfigError(
            f'{path} holds no conversation; expected [{{"conversations": [{{"from": "human", "value": …}}]}}]'
        )
    return sessions


def replay(messages: Sequence[Message], session: str, tools: Sequence[dict[str, Any]]) -> LoadSession:
    """Make one turn for each assistant message, with everything before it, and one for a final user message."""
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]
    if messages and messages[-1]["role"] == "user":
        ends.append(len(messages))
    return LoadSession([Turn(Messages(messages, end, tools), session) for end in ends])


def _openai_message(message: Message) -> Message:
    """Return the message in OpenAI's format. Some recordings list several call ids for a tool result; the first is used."""
    if "tool_call_ids" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_call_ids"}
    return {**rest, "tool_call_id": message["tool_call_ids"][0]}


def _plain_message(message: Message) -> Message:
    """Return the message with tool calls and results as text, for servers and templates without tools."""
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        text += "\n" + msgspec.json.encode(call["function"]).decode()
    return {"role": "user" if message["role"] == "tool" else message["role"], "content": text.strip()}


def _length(mean: int, range_ratio: float, rng: random.Random) -> int:
    return max(1, rng.randint(round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))))


def random_words(num: int, input_tokens: int, output_tokens: int, range_ratio: float, seed: int) -> list[LoadSession]:
    """Return chats with prompts of about `input_tokens` tokens. The server's usage reports the exact number."""
    rng = random.Random(seed)
    sessions = []
    for index in range(num):
        text = " ".join(rng.choices(WORDS, k=_length(input_tokens, range_ratio, rng)))
        turn = Turn(
            Messages([{"role": "user", "content": text}], 1),
            session=f"random-{seed}-{index}",
            max_tokens=_length(output_tokens, range_ratio, rng),
        )
        sessions.append(LoadSession([turn]))
    return sessions


def random_tokens(
    num: int, input_tokens: int, output_tokens: int, range_ratio: float, seed: int, token_range: TokenRange
) -> list[LoadSession]:
    """Return completions whose prompts have exactly the sampled number of tokens."""
    rng = random.Random(seed)
    sessions = []
    for index in range(num):
        name = f"random-{seed}-{index}"
        length = _length(input_tokens, range_ratio, rng)
        turn = Turn(
            Blocks((), name, length, length, token_range),
            session=name,
            max_tokens=_length(output_tokens, range_ratio, rng),
        )
        sessions.append(LoadSession([turn]))
    return sessions
