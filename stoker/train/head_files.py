"""The files of a trained head, in the layout of SpecForge and EAGLE."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from stoker.base.errors import ConfigError
from stoker.models.family import ModelShape, field
from stoker.train.draft_vocab import DraftVocab
from stoker.train.trainable_head import TrainableHead, default_taps
from stoker.train.work_folder import WorkFolderError, sync_folder, write_file

REPORT = "train_report.json"
_STORED = torch.bfloat16
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


def head_config(hf: Mapping[str, Any], shape: ModelShape, draft_vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a head for the model with config.json `hf`: one layer in the model's own shape."""
    rope = {name: hf[name] for name in _ROPE_FIELDS if hf.get(name) is not None}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": field(hf, "intermediate_size", int),
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": field(hf, "rms_norm_eps", float),
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(_STORED).removeprefix("torch."),
        # Numbered by the layer whose output is taken, as SpecForge does it.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in default_taps(shape.num_layers)],
            "use_aux_hidden_state": True,
        },
        **rope,
    }


def check_out(out: Path) -> None:
    """Raise ConfigError if `out` exists and is no earlier result: its files would be lost."""
    if out.exists() and not (out.is_dir() and ((out / REPORT).exists() or not any(out.iterdir()))):
        raise ConfigError(f"--out {out} exists and is no trained head; choose another folder or remove it")


def write_head(folder: Path, head: TrainableHead, vocab: DraftVocab, config: Mapping[str, Any]) -> None:
    """Write config.json and model.safetensors."""
    tensors = {name: parameter.detach().cpu().to(_STORED) for name, parameter in head.named_parameters()}
    tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    write_file(folder / "model.safetensors", save_tensors(tensors, {"format": "pt"}))
    write_file(folder / "config.json", json.dumps(config, indent=2).encode())


@contextmanager
def replaced_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `out` at the end. After an error, `out` is as it was."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise WorkFolderError(f"{out} cannot be written: {error.strerror}") from error
    try:
        yield made
        made.chmod(0o755)
        old = made.with_name(f"{made.name}.old")
        if out.exists():
            os.replace(out, old)
        os.replace(made, out)
        sync_folder(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)
