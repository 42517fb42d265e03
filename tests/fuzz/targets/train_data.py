"""Data files of `stoker train-draft`: JSON lines with conversations and texts."""

from __future__ import annotations

import gzip
import random
import tempfile
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.train.data_files import read_data_files
from tests.fuzz.target import FuzzTarget

_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-train-data-"))


def execute(data: bytes, rng: random.Random) -> None:
    file = _FOLDER / ("data.jsonl.gz" if data[:2] == b"\x1f\x8b" else "data.jsonl")
    file.write_bytes(data)
    for prompt in read_data_files([file], rng.randrange(3)):
        assert bool(prompt.messages) != bool(prompt.text)
        assert not prompt.messages or prompt.messages[0]


def seeds() -> list[bytes]:
    rows = b"""{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}], "tools": []}
{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "tool", "content": "3"}]}

{"turns": ["one", "two"]}
{"text": "Once upon a time"}
"""
    return [rows, gzip.compress(rows)]


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(ConfigError,),
    tokens=[
        b'"messages": ', b'"turns": ', b'"text": ', b'"tools": ', b'"role": ', b'"assistant"', b"null", b"[]", b"{}", b"\n",
        b'"\\ud800"', b"1e999", b"NaN", b"\x1f\x8b\x08", b"\xff", b"[[[[",
    ],
    is_network=False,
    base_bytes=8 << 20,
)  # fmt: skip
