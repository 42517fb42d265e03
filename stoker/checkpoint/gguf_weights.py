"""Convert GGUF tensors to model.safetensors, with the names and the row order of Hugging Face models.

Quantised tensors stay quantised: 8-bit codes, and a scale and a minimum in float16 per group of inputs. All others are written in
float32, also a quantised tensor that the engine fuses with one that is not.

The output is streamed, a bounded number of rows at a time, so that the model need not fit into memory. Every tensor of the model
must be in the file, and every tensor of the file must be used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.gguf_config import ROPE_FREQS, GgufShape
from stoker.checkpoint.gguf_file import GROUP, GROUPED_TYPES, GgufFile, damaged
from stoker.checkpoint.progress import Progress

CHUNK_BYTES = 64 << 20
_ITEM_BYTES = {"F32": 4, "F16": 2, "I8": 1}
_ALIGNMENT = 8  # of the tensor data in a safetensors file


@dataclass(frozen=True)
class ConvertedWeight:
    """A tensor of the output, and the GGUF tensor that it comes from."""

    name: str  # in the Hugging Face model
    source: str  # in the GGUF file
    shape: tuple[int, ...]
    rope_heads: int = 0  # the number of heads whose rows are stored in interleaved rope order; 0: none
    fused: str = ""  # weights of the same name here are one matmul in the engine; "": this one alone
    is_grouped: bool = False  # written as codes, scales and minimums

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each tensor of the output, by name."""
        if not self.is_grouped:
            return {self.name: ("F32", self.shape)}
        groups = ("F16", (self.shape[0], self.shape[1] // GROUP))
        return {self.name: ("I8", self.shape), f"{self.name}_scale": groups, f"{self.name}_min": groups}

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * _ITEM_BYTES[dtype] for dtype, shape in self.tensors.values())

    def row_order(self) -> npt.NDArray[np.intp]:
        """Return, for each row of the output, its row number in the GGUF tensor."""
        rows = np.arange(self.shape[0])
        if not self.rope_heads:
            return rows
        # Interleaved rope rotates the pairs (0, 1), (2, 3), ... of a head; Hugging Face's rotates (0, half), (1, half + 1), ...
        return rows.reshape(self.rope_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def weights_of(file: GgufFile, shape: GgufShape) -> list[ConvertedWeight]:
    """Return all weights of the model, after a check of their names and shapes against the file."""
    weights = list(_expected(shape))
    unused = sorted(file.tensors.keys() - {weight.source for weight in weights} - {ROPE_FREQS})
    if unused:
        raise ModelFilesError(
            f"{file.path}: a {shape.architecture.hf_class} has no use for {len(unused)} of its tensors: "
            f"{', '.join(unused[:3])}. Use the model's original folder with safetensors"
        )
    for weight in weights:
        tensor = file.tensors.get(weight.source)
        if tensor is None:
            raise damaged(file.path, f"it has no tensor {weight.source}")
        if tensor.shape != weight.shape:
            raise damaged(
                file.path, f"tensor {weight.source} has the shape {tensor.shape}, but the metadata says {weight.shape}"
            )
    quantised = {weight.source for weight in weights if file.tensors[weight.source].type in GROUPED_TYPES}
    plain = {weight.fused for weight in weights if weight.source not in quantised} - {""}
    return [replace(weight, is_grouped=weight.source in quantised and weight.fused not in plain) for weight in weights]


def quantisation_config(weights: list[ConvertedWeight]) -> dict[str, object] | None:
    """Return the part of config.json that says which weights are quantised."""
    modules = [weight.module for weight in weights if weight.is_grouped]
    return {"quant_method": "gguf", "group_size": GROUP, "modules": modules} if modules else None


def _expected(shape: GgufShape) -> Iterator[ConvertedWeight]:
    hidden, inner = shape.hidden, shape.intermediate
    q_rows, kv_rows = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    rope = shape.architecture.permutes_rope
    yield ConvertedWeight("model.embed_tokens.weight", "token_embd.weight", (shape.vocab, hidden))
    for layer in range(shape.num_layers):
        to, of = f"model.layers.{layer}", f"blk.{layer}"
        yield ConvertedWeight(f"{to}.input_layernorm.weight", f"{of}.attn_norm.weight", (hidden,))
        rope_heads = {"q": shape.num_heads, "k": shape.num_kv_heads} if rope else {}
        for part, num_rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            names = (f"{to}.self_attn.{part}_proj.weight", f"{of}.attn_{part}.weight")
            yield ConvertedWeight(*names, (num_rows, hidden), rope_heads.get(part, 0), fused=f"{of}.qkv")
        yield ConvertedWeight(f"{to}.self_attn.o_proj.weight", f"{of}.attn_output.weight", (hidden, q_rows))
        if shape.architecture.head_norms:
            yield ConvertedWeight(f"{to}.self_attn.q_norm.weight", f"{of}.attn_q_norm.weight", (shape.head_size,))
            yield ConvertedWeight(f"{to}.self_attn.k_norm.weight", f"{of}.attn_k_norm.weight", (shape.head_size,))
        yield ConvertedWeight(f"{to}.post_attention_layernorm.weight", f"{of}.ffn_norm.weight", (hidden,))
        for part in ("gate", "up"):
            names = (f"{to}.mlp.{part}_proj.weight", f"{of}.ffn_{part}.weight")
            yield ConvertedWeight(*names, (inner, hidden), fused=f"{of}.gate_up")
        yield ConvertedWeight(f"{to}.mlp.down_proj.weight", f"{of}.ffn_down.weight", (hidden, inner))
    yield ConvertedWeight("model.norm.weight", "output_norm.weight", (hidden,))
    if not shape.tied:
        yield ConvertedWeight("lm_head.weight", "output.weight", (shape.vocab, hidden))


def head_bytes(weights: list[ConvertedWeight]) -> bytes:
    """Return the header of the safetensors file: the length of a JSON text, and the text."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for weight in weights:
        for name, (dtype, shape) in weight.tensors.items():
            span = [at, at + math.prod(shape) * _ITEM_BYTES[dtype]]
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": span}
            at = span[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_weights(file: GgufFile, weights: list[ConvertedWeight], path: Path, progress: Progress) -> None:
    """Convert all weights and write them to `path`."""
    stage = f"converting {file.path.name}"
    with path.open("wb", buffering=0) as out:
        write(out, head_bytes(weights))
        for done, weight in enumerate(weights):
            progress(stage, done, len(weights))
            for part in range(len(weight.tensors)):
                for rows in _chunks(weight):
                    values = _values(file, weight, rows)[part]
                    if not np.isfinite(values).all():
                        raise damaged(file.path, f"tensor {weight.source} holds values that are not finite")
                    write(out, np.ascontiguousarray(values).data.cast("B"))
    progress(stage, len(weights), len(weights))


def _values(
    file: GgufFile, weight: ConvertedWeight, rows: npt.NDArray[np.intp]
) -> Sequence[npt.NDArray[np.int8] | npt.NDArray[np.float16] | npt.NDArray[np.float32]]:
    """Return some rows of each tensor of the output."""
    tensor = file.tensors[weight.source]
    return file.groups(tensor, rows) if weight.is_grouped else [file.rows(tensor, rows)]


def _chunks(weight: ConvertedWeight) -> Iterator[npt.NDArray[np.intp]]:
    order = weight.row_order()
    num_rows = max(1, CHUNK_BYTES * weight.shape[0] // weight.num_bytes)
    for start in range(0, len(order), num_rows):
        yield order[start : start + num_rows]


def write(out: FileIO, data: bytes | memoryview) -> None:
    """Write all of `data`. After a short write, continue until all is written or the system reports an error."""
    while data:
        data = data[out.write(data) :]
