"""Safetensors headers and the index of a model folder."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.hf_folder import check_folder
from stoker.checkpoint.weight_files import INDEX, SINGLE, stored_tensors, weight_files
from tests.fuzz.target import FuzzTarget

_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-safetensors-"))
_MARK = b"\n--file--\n"  # between the weights, the index and config.json


def execute(data: bytes, rng: random.Random) -> None:
    weights, _, rest = data.partition(_MARK)
    index, _, config = rest.partition(_MARK)
    (_FOLDER / SINGLE).write_bytes(weights)
    (_FOLDER / "config.json").write_bytes(config or b"{}")
    (_FOLDER / "tokenizer.json").write_bytes(config or b"{}")
    if index:
        (_FOLDER / INDEX).write_bytes(index)
    else:
        (_FOLDER / INDEX).unlink(missing_ok=True)
    weight_files(_FOLDER)
    for tensor in stored_tensors(_FOLDER).values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= len(weights)
        assert all(type(size) is int and size >= 0 for size in tensor.shape), tensor.shape
    check_folder(_FOLDER)


def seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    }
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + bytes(26)
    index = json.dumps({"metadata": {}, "weight_map": {"a": SINGLE, "b": SINGLE}}).encode()
    return [weights, weights + _MARK + index, weights + _MARK + index + _MARK + b'{"model_type":"llama"}']


def repair(data: bytes) -> bytes:
    """Set the header's length to what is there, so that the JSON behind it is parsed."""
    end = data.find(b"}}", 8) + 2
    return struct.pack("<Q", end - 8) + data[8:] if end > 9 else data


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(ModelFilesError,),
    tokens=[b'"dtype":"F32"', b'"shape":[', b'"data_offsets":[0,24]', b"weight_map", _MARK, b'"../x"', b'"\\u0000"'],
    repair=repair,
    is_network=False,
)
