"""A checkpoint with the tensor names and shapes of a 1T-parameter model of int4 experts: real headers, empty (sparse) data."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

NUM_LAYERS, NUM_EXPERTS, HIDDEN, WIDTH, VOCAB, NUM_FILES = 60, 384, 7168, 2048, 163840, 64
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 18432,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
}


def _shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)),
        "model.norm.weight": ("BF16", (HIDDEN,)),
        "lm_head.weight": ("BF16", (VOCAB, HIDDEN)),
    }
    sizes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    for number in range(NUM_LAYERS):
        layer = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = ("BF16", (HIDDEN,))
        for name in "qk":
            tensors[f"{layer}self_attn.{name}_norm.weight"] = ("BF16", (HEAD_DIM,))
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = ("BF16", (heads * HEAD_DIM, HIDDEN))
        tensors[f"{layer}self_attn.o_proj.weight"] = ("BF16", (HIDDEN, HEADS * HEAD_DIM))
        tensors[f"{layer}mlp.gate.weight"] = ("BF16", (NUM_EXPERTS, HIDDEN))
        for expert in range(NUM_EXPERTS):
            for name, (outs, ins) in sizes.items():
                module = f"{layer}mlp.experts.{expert}.{name}_proj"
                tensors[f"{module}.weight_packed"] = ("I32", (outs, ins // 8))
                tensors[f"{module}.weight_scale"] = ("BF16", (outs, ins // 32))
                tensors[f"{module}.weight_shape"] = ("I32", (2,))
    return tensors


def make_large(folder: Path) -> int:
    """Write the checkpoint: 0.6 TB of holes, some ten MB of headers. Return the number of tensors."""
    shapes = _shapes()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = list(shapes)
    per_file, places = -(-len(names) // NUM_FILES), {}
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name in names[number * per_file : (number + 1) * per_file]:
            dtype, shape = shapes[name]
            size = {"BF16": 2, "I32": 4}[dtype]
            for length in shape:
                size *= length
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
            places[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as data:
            data.write(struct.pack("<Q", len(text)) + text)
            data.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return len(names)
