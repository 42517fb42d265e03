"""Prompts from files of JSON lines: the public formats, and bad lines, which are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.train.data_files import read_data_files

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "3"}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_each_line_gives_one_prompt_that_ends_before_an_answer(tmp_path: Path) -> None:
    talk = [USER, CALL, TOOL, ANSWER, USER, ANSWER]
    file = write(tmp_path / "a.jsonl", {"messages": talk}, "", {"turns": ["one", "two"]}, {"text": "long text"},
                 {"messages": [USER]}, {"messages": talk, "tools": [{"type": "function"}]})  # fmt: skip
    found = read_data_files([file], seed=3)
    assert [one.where for one in found] == [f"{file}:{number}" for number in (1, 3, 4, 5, 6)]
    assert found[0].messages in (talk[:1], talk[:3], talk[:5])
    assert found[1].messages == [{"role": "user", "content": "one"}]
    assert found[2].text == "long text"
    assert found[3].messages == [USER]
    assert found[4].tools == [{"type": "function"}]


def test_the_seed_chooses_the_answer(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *({"messages": [USER, ANSWER] * 4} for _ in range(20)))
    lengths = [[len(one.messages) for one in read_data_files([file], seed)] for seed in (1, 1, 2)]
    assert lengths[0] == lengths[1] != lengths[2]
    assert set(lengths[0]) == {1, 3, 5, 7}


def test_compressed_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({"text": "x"}).encode()))
    assert len(read_data_files([file], 0)) == 1
    file.write_bytes(file.read_bytes()[:-6])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz cannot be read after line"):
        read_data_files([file], 0)


BAD_LINES = {
    "no JSON": ("{", "not valid JSON"),
    "no object": ([1], "a JSON object is expected, found list"),
    "no field": ({"content": "x"}, "no prompt; one of the fields 'messages'"),
    "empty messages": ({"messages": []}, "'messages' must be a list that is not empty"),
    "messages of another type": ({"messages": "hello"}, "'messages' must be a list"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\] is not an object with a role"),
    "empty prompt": ({"messages": [{"role": "user", "content": " "}, ANSWER]}, r"messages\[0\] is an empty prompt"),
    "answer only": ({"messages": [ANSWER]}, "no prompt"),
    "empty text": ({"text": "  "}, "'text' is empty"),
    "empty turns": ({"turns": [""]}, "'turns' must be a list"),
    "tools of another type": ({"messages": [USER], "tools": [1]}, "'tools' must be a list of objects"),
    "deep": ("[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(name: str, tmp_path: Path) -> None:
    row, message = BAD_LINES[name]
    file = write(tmp_path / "bad.jsonl", {"text": "good"}, row)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: .*{message}"):
        read_data_files([file], 0)


def test_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data: .*missing\.jsonl cannot be read"):
        read_data_files([tmp_path / "missing.jsonl"], 0)
    with pytest.raises(ConfigError, match=r"--data: no prompts in .*empty\.jsonl"):
        read_data_files([write(tmp_path / "empty.jsonl", "")], 0)


def test_the_public_training_sets_are_read(data_dir: Path) -> None:
    files = [data_dir / "train" / f"{name}.jsonl.gz" for name in ("gpteacher", "gsm8k_train", "tm4_tool_dialogues")]
    if not all(file.exists() for file in files):
        pytest.skip("the training sets are not here")
    assert len(read_data_files(files, 0)) == 12_208 + 7473 + 3710
