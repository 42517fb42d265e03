"""Writes the folder of a scripted model (`plugin/families/scripted.py`), and starts it behind the real worker and gateway."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

PLUGIN = Path(__file__).parent / "plugin"
MAX_POSITIONS = 1 << 17
_TURN = "<|im_start|>assistant\n"
_END = "<|im_end|>"
_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_script(folder: Path, tokenizer_folder: Path, answers: Sequence[str]) -> Path:
    """Write a model that gives these answers, one per turn. The tokenizer must be that of a ChatML model."""
    folder.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(tokenizer_folder / name, folder / name)
    config = json.loads((tokenizer_folder / "config.json").read_text())
    config.pop("quantization_config", None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    [end] = ids(_END)
    config |= {
        "architectures": ["ScriptedForCausalLM"],
        "max_position_embeddings": MAX_POSITIONS,
        "script": {"turn": ids(_TURN), "answers": [ids(answer) for answer in answers], "end": end},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"pace": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def call(name: str, **arguments: object) -> str:
    """Return a tool call as ChatML models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def python_path() -> str:
    """Return the PYTHONPATH with which worker processes know the scripted family."""
    return os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
