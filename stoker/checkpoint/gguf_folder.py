"""Convert a GGUF file to a folder in Hugging Face format: configs, tokenizer files and model.safetensors. Quantised
weights stay quantised.

Everything is checked before the first byte is written. The caller publishes the folder when it is complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.checkpoint.cache import disk_errors, require_space
from stoker.checkpoint.gguf_config import generation_config, model_config, read_shape
from stoker.checkpoint.gguf_file import damaged, open_gguf
from stoker.checkpoint.gguf_tokenizer import build_tokenizer, tokenizer_config
from stoker.checkpoint.gguf_weights import head_bytes, quantisation_config, weights_of, write_weights
from stoker.checkpoint.progress import Progress

# Increase it when the output of a conversion changes: then folders of other versions are converted again.
FORMAT_VERSION = 3


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Convert `source` into the empty `folder`. Raise ModelFilesError if the file is invalid or the disk is full."""
    file = open_gguf(source)
    shape = read_shape(file)
    weights = weights_of(file, shape)
    tokenizer = build_tokenizer(file)
    if tokenizer.get_vocab_size() > shape.vocab:
        raise damaged(
            source, f"its tokenizer has {tokenizer.get_vocab_size()} tokens, but its embedding {shape.vocab} rows"
        )
    texts = {
        "config.json": _json(model_config(file, shape) | {"quantization_config": quantisation_config(weights)}),
        "generation_config.json": _json(generation_config(file)),
        "tokenizer_config.json": _json(tokenizer_config(file)),
        "tokenizer.json": tokenizer.to_str().encode(),
    }
    weight_bytes = len(head_bytes(weights)) + sum(weight.num_bytes for weight in weights)
    needed_bytes = weight_bytes + sum(len(text) for text in texts.values())
    require_space(folder, needed_bytes)
    with disk_errors(folder, needed_bytes):
        for name, text in texts.items():
            (folder / name).write_bytes(text)
        write_weights(file, weights, folder / "model.safetensors", progress)


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps({key: value for key, value in content.items() if value is not None}, indent=2).encode() + b"\n"
