"""GGUF tensors -> model.safetensors in float32, under their HF names and in HF's row order.

The file is streamed: its head first, then a bounded number of rows at a time, so that a model needs no memory of its
own size. Strict both ways: each tensor of the model is there, and each tensor of the file is used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.gguf_config import ROPE_FREQS, Shape
from stoker.checkpoint.gguf_file import GgufFile, damaged
from stoker.checkpoint.progress import Progress

CHUNK_BYTES = 64 << 20
_ALIGNMENT = 8  # of the data in a safetensors file


@dataclass(frozen=True)
class Weight:
    name: str  # HF's
    source: str  # GGUF's
    shape: tuple[int, ...]
    rope_heads: int = 0  # its rows are heads in the order of interleaved rope, to be put back

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * 4

    def row_order(self) -> npt.NDArray[np.intp]:
        """Which row of the file's tensor each row of HF's tensor is."""
        rows = np.arange(self.shape[0])
        if not self.rope_heads:
            return rows
        # Interleaved rope turns rows (0, 1), (2, 3), ... of a head together; HF's turns (0, half), (1, half + 1), ...
        return rows.reshape(self.rope_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def weights_of(file: GgufFile, shape: Shape) -> list[Weight]:
    """All weights of the model, each checked against the file."""
    weights = list(_expected(shape))
    unused = sorted(file.tensors.keys() - {weight.source for weight in weights} - {ROPE_FREQS})
    if unused:
        raise ModelFilesError(
            f"{file.path}: {len(unused)} of its tensors have no place in a {shape.architecture.hf_class}: "
            f"{', '.join(unused[:3])}. Take the model's original folder with safetensors"
        )
    for weight in weights:
        tensor = file.tensors.get(weight.source)
        if tensor is None:
            raise damaged(file.path, f"it has no tensor {weight.source}")
        if tensor.shape != weight.shape:
            raise damaged(file.path, f"tensor {weight.source} is {tensor.shape}, and its metadata says {weight.shape}")
    return weights


def _expected(shape: Shape) -> Iterator[Weight]:
    hidden, inner = shape.hidden, shape.intermediate
    q_rows, kv_rows = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    rope = shape.architecture.permutes_rope
    yield Weight("model.embed_tokens.weight", "token_embd.weight", (shape.vocab, hidden))
    for layer in range(shape.num_layers):
        to, of = f"model.layers.{layer}", f"blk.{layer}"
        yield Weight(f"{to}.input_layernorm.weight", f"{of}.attn_norm.weight", (hidden,))
        yield Weight(
            f"{to}.self_attn.q_proj.weight", f"{of}.attn_q.weight", (q_rows, hidden), shape.num_heads if rope else 0
        )
        yield Weight(
            f"{to}.self_attn.k_proj.weight", f"{of}.attn_k.weight", (kv_rows, hidden), shape.num_kv_heads if rope else 0
        )
        yield Weight(f"{to}.self_attn.v_proj.weight", f"{of}.attn_v.weight", (kv_rows, hidden))
        yield Weight(f"{to}.self_attn.o_proj.weight", f"{of}.attn_output.weight", (hidden, q_rows))
        if shape.architecture.head_norms:
            yield Weight(f"{to}.self_attn.q_norm.weight", f"{of}.attn_q_norm.weight", (shape.head_size,))
            yield Weight(f"{to}.self_attn.k_norm.weight", f"{of}.attn_k_norm.weight", (shape.head_size,))
        yield Weight(f"{to}.post_attention_layernorm.weight", f"{of}.ffn_norm.weight", (hidden,))
        yield Weight(f"{to}.mlp.gate_proj.weight", f"{of}.ffn_gate.weight", (inner, hidden))
        yield Weight(f"{to}.mlp.up_proj.weight", f"{of}.ffn_up.weight", (inner, hidden))
        yield Weight(f"{to}.mlp.down_proj.weight", f"{of}.ffn_down.weight", (hidden, inner))
    yield Weight("model.norm.weight", "output_norm.weight", (hidden,))
    if not shape.tied:
        yield Weight("lm_head.weight", "output.weight", (shape.vocab, hidden))


def head_bytes(weights: list[Weight]) -> bytes:
    """What a safetensors file begins with: the length of a JSON text, and the text."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for weight in weights:
        span = [at, at + weight.num_bytes]
        entries[weight.name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_weights(file: GgufFile, weights: list[Weight], path: Path, progress: Progress) -> None:
    stage = f"converting {file.path.name}"
    with path.open("wb", buffering=0) as out:
        write(out, head_bytes(weights))
        for done, weight in enumerate(weights):
            progress(stage, done, len(weights))
            for rows in _chunks(weight):
                values = file.rows(file.tensors[weight.source], rows)
                if not np.isfinite(values).all():
                    raise damaged(file.path, f"tensor {weight.source} holds numbers that are not finite")
                write(out, values.data.cast("B"))
    progress(stage, len(weights), len(weights))


def _chunks(weight: Weight) -> Iterator[npt.NDArray[np.intp]]:
    order = weight.row_order()
    num_rows = max(1, CHUNK_BYTES * weight.shape[0] // weight.num_bytes)
    for start in range(0, len(order), num_rows):
        yield order[start : start + num_rows]


def write(out: FileIO, data: bytes | memoryview) -> None:
    """Every byte of a conversion's weights goes through here; a short write goes on until the system says why."""
    while data:
        data = data[out.write(data) :]
