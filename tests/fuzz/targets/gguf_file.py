"""GGUF files: header, shape, config and tokenizer of the conversion, without writing the weights."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import gguf
import numpy as np

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.gguf_config import generation_config, model_config, read_shape
from stoker.checkpoint.gguf_file import open_gguf
from stoker.checkpoint.gguf_tokenizer import build_tokenizer, tokenizer_config
from stoker.checkpoint.gguf_weights import head_bytes, weights_of
from tests.checkpoint.tiny_gguf import TinyGguf
from tests.fuzz.target import FuzzTarget

_FILE = Path(tempfile.mkdtemp(prefix="fuzz-gguf-")) / "model.gguf"


def execute(data: bytes, rng: random.Random) -> None:
    _FILE.write_bytes(data)
    file = open_gguf(_FILE)
    shape = read_shape(file)
    model_config(file, shape)
    generation_config(file)
    tokenizer_config(file)
    build_tokenizer(file)
    head_bytes(weights_of(file, shape))
    for tensor in file.tensors.values():
        assert tensor.offset + tensor.num_bytes <= len(data)
        file.rows(tensor, np.arange(min(2, tensor.shape[0])))


def seeds() -> list[bytes]:
    files = (
        TinyGguf(),
        TinyGguf(arch="qwen3", kind=gguf.GGMLQuantizationType.Q8_0, pre="qwen2"),
        TinyGguf(pre="llama-bpe", extra={"rope_freqs.weight": np.ones(16, np.float32)}),
    )
    contents = []
    for one in files:
        one.write(_FILE)
        contents.append(_FILE.read_bytes())
    return contents


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(ModelFilesError,),
    tokens=[b"GGUF", b"general.architecture", b"general.alignment", b"tokenizer.ggml.tokens", b"llama.block_count"],
    is_network=False,
    base_bytes=16 << 20,
    max_input_bytes=1 << 20,
    mutated_bytes=10 << 10,
)
