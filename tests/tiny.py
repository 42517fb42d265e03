"""Tiny random models in Hugging Face's format, made by transformers, the reference for ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from stoker.models.family import MODELS

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# Every registered family's examples: name -> (architecture, changes to SHAPE).
SHAPES: dict[str, tuple[str, Mapping[str, Any]]] = {
    name: (architecture, changes)
    for architecture in MODELS
    for name, changes in MODELS.get(architecture).examples.items()
}


# Models whose files have those of another architecture inside: its config.json in `text_config`, and its weights with a
# prefix. transformers has only the inner one, or makes it without the rest of the model.
NESTED = {
    "KimiK25ForConditionalGeneration": ("DeepseekV3ForCausalLM", "language_model."),
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM", "language_model."),
}


def config_of(name: str) -> dict[str, Any]:
    """Return a config.json of a tiny model."""
    architecture, changes = SHAPES[name]
    config = {**SHAPE, **changes, "architectures": [architecture]}
    return {"architectures": [architecture], "text_config": config} if architecture in NESTED else config


def nest(folder: Path, architecture: str, prefix: str) -> None:
    """Rewrite the files of a model as those of an architecture that contains it."""
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    save_file({f"{prefix}{name}": values for name, values in tensors.items()}, folder / "model.safetensors")


def make_tiny(folder: Path, name: str, dtype: torch.dtype = torch.float32, **more_changes: Any) -> Any:
    """Write the model into `folder` and return transformers' own."""
    named, changes = SHAPES[name]
    architecture, prefix = NESTED.get(named, (named, ""))
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**SHAPE, **changes, **more_changes})
    torch.manual_seed(0)
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for values in model.state_dict().values():
            # transformers initialises norms to one and biases to zero; a swapped or missing one would not show.
            values.add_(torch.randn_like(values) * 0.05)
    model.save_pretrained(folder)
    if prefix:
        nest(folder, named, prefix)
    return model
