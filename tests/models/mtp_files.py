"""Tiny models whose files have a layer for drafts, as DeepSeek-V3 and GLM-4.5 have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from torch import Tensor

HIDDEN = 72


def make_mtp(folder: Path, num_layers: int, name: str = "deepseek", **changes: Any) -> tuple[Any, dict[str, Tensor]]:
    """Write a model of `num_layers` layers and one for drafts. Return transformers' model, which has one layer more, and the
    other tensors of the layer for drafts."""
    changes |= {"num_hidden_layers": num_layers + 1, "num_nextn_predict_layers": 1}
    reference = make_tiny(folder, name, torch.float64, **changes)
    reference.config._attn_implementation = reference.config._experts_implementation = "eager"  # in float64
    torch.manual_seed(1)
    extra = {
        "eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN, dtype=torch.float64) / 12,
        **{name: 1 + torch.randn(HIDDEN, dtype=torch.float64) / 9 for name in ("enorm.weight", "hnorm.weight",
                                                                             "shared_head.norm.weight")},
    }  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    layer = f"model.layers.{num_layers}."
    tensors |= {f"{layer}{name}": values for name, values in extra.items()}
    tensors |= {
        f"{layer}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{layer}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return reference, extra
