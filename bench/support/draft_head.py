"""EAGLE-3 heads with random weights, in a format that Stoker and vLLM read. Their drafts are wrong; what counts is their cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20  # different random values; a tensor repeats them
_KEPT = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
         "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling")  # fmt: skip


def head_config(target: Mapping[str, Any], draft_vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a head for a target model: one dense layer in the target's own shape."""
    num_layers = target["num_hidden_layers"]
    return {
        **{name: target[name] for name in _KEPT if target.get(name) is not None},
        "architectures": ["Eagle3LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(draft_vocab_size, target["vocab_size"]),
        "eagle_aux_hidden_state_layer_ids": [2, num_layers // 2, num_layers - 3],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def tensor_shapes(head: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's tensors. A head with the whole vocabulary uses the target model's output matrix."""
    hidden, mlp, draft_vocab = head["hidden_size"], head["intermediate_size"], head["draft_vocab_size"]
    queries, keys = (head[name] * head["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention, features = "midlayer.self_attn", len(head["eagle_aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features * hidden),
        f"{attention}.q_proj.weight": (queries, 2 * hidden),
        f"{attention}.k_proj.weight": (keys, 2 * hidden),
        f"{attention}.v_proj.weight": (keys, 2 * hidden),
        f"{attention}.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (mlp, hidden),
        "midlayer.mlp.up_proj.weight": (mlp, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, mlp),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    shapes |= {f"{norm}.weight": (hidden,) for norm in norms}
    if draft_vocab < head["vocab_size"]:
        shapes |= {"lm_head.weight": (draft_vocab, hidden), "d2t": (draft_vocab,)}
    return shapes


def write_head(folder: Path, target: Mapping[str, Any], draft_vocab_size: int, *, weights: bool = True) -> Path:
    """Write a head for a target model into a new folder, and return the folder. Without weights: config.json alone."""
    head = head_config(target, draft_vocab_size)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head))
    if weights:
        import torch
        from safetensors.torch import save_file

        values = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
        tensors = {}
        for name, shape in tensor_shapes(head).items():
            size = torch.Size(shape).numel()
            tensors[name] = values.repeat(-(-size // _BLOCK))[:size].reshape(shape).contiguous()
        if "d2t" in tensors:
            tensors["d2t"] = torch.zeros_like(tensors["d2t"], dtype=torch.int64)  # draft token i is token i
        save_file(tensors, folder / "model.safetensors")
    return folder
