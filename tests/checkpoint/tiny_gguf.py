"""Tiny GGUF files for the tests: a few layers, a toy byte-level BPE, random weights of a chosen type."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

Array = npt.NDArray[Any]

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "2 0", "20 2", "Ġ Ġ"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<tool_call>"
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), USER_DEFINED]
TYPES = [3] * 3 + [1] * (len(TOKENS) - 4) + [4]
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2, 64, 96, 4, 2, 32
VOCAB = 288  # rows of the embedding: a few more than there are tokens, as in padded models


@dataclass
class TinyGguf:
    """The content of the file. A test changes the fields that it is about."""

    arch: str = "llama"
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    kinds: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)  # other types, by the tensor's name
    tied: bool = True
    pre: str = "smollm"
    head: int = HEAD
    metadata: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Array] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    tokens: list[str] = field(default_factory=lambda: list(TOKENS))
    merges: list[str] = field(default_factory=lambda: list(MERGES))

    def write(self, path: Path) -> dict[str, Array]:
        """Write the file. Return its tensors in Hugging Face names and row order, rounded to what the type can hold."""
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_block_count(LAYERS)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(self.head)
        writer.add_value_length(self.head)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(50000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(TYPES)
        writer.add_token_merges(self.merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template("{{ messages }}")
        for key, value in self.metadata.items():
            kinds = {
                bool: gguf.GGUFValueType.BOOL,
                int: gguf.GGUFValueType.UINT32,
                float: gguf.GGUFValueType.FLOAT32,
                str: gguf.GGUFValueType.STRING,
            }
            writer.add_key_value(key, value, kinds[type(value)])
        expected = self._weights(writer)
        for name, data in self.extra.items():
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return expected

    def _weights(self, writer: gguf.GGUFWriter) -> dict[str, Array]:
        random = np.random.default_rng(7)
        expected = {}
        for hf_name, name, shape, heads in self._names():
            values = random.standard_normal(shape).astype(np.float32)
            kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else self.kinds.get(name, self.kind)
            stored = gguf.quantize(values, kind)
            expected[hf_name] = gguf.dequantize(stored, kind).reshape(shape)
            if heads and self.arch == "llama":  # as llama.cpp's converter permutes
                stored = stored.reshape(heads, 2, -1, stored.shape[-1]).swapaxes(1, 2).reshape(stored.shape)
            if name not in self.without:
                writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
        return expected

    def _names(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        q_rows, kv_rows = HEADS * self.head, KV_HEADS * self.head
        names: list[tuple[str, str, tuple[int, ...], int]] = [
            ("model.embed_tokens.weight", "token_embd.weight", (VOCAB, HIDDEN), 0),
            ("model.norm.weight", "output_norm.weight", (HIDDEN,), 0),
        ]
        if not self.tied:
            names.append(("lm_head.weight", "output.weight", (VOCAB, HIDDEN), 0))
        for layer in range(LAYERS):
            parts: list[tuple[str, str, tuple[int, ...], int]] = [
                ("input_layernorm", "attn_norm", (HIDDEN,), 0),
                ("self_attn.q_proj", "attn_q", (q_rows, HIDDEN), HEADS),
                ("self_attn.k_proj", "attn_k", (kv_rows, HIDDEN), KV_HEADS),
                ("self_attn.v_proj", "attn_v", (kv_rows, HIDDEN), 0),
                ("self_attn.o_proj", "attn_output", (HIDDEN, q_rows), 0),
                ("post_attention_layernorm", "ffn_norm", (HIDDEN,), 0),
                ("mlp.gate_proj", "ffn_gate", (INNER, HIDDEN), 0),
                ("mlp.up_proj", "ffn_up", (INNER, HIDDEN), 0),
                ("mlp.down_proj", "ffn_down", (HIDDEN, INNER), 0),
            ]
            if self.arch == "qwen3":
                parts += [
                    ("self_attn.q_norm", "attn_q_norm", (self.head,), 0),
                    ("self_attn.k_norm", "attn_k_norm", (self.head,), 0),
                ]
            names += [
                (f"model.layers.{layer}.{hf}.weight", f"blk.{layer}.{name}.weight", shape, heads)
                for hf, name, shape, heads in parts
            ]
        return names
