"""What identifies a model and its KV: two engines share KV, and ranks work together, only if these are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.weight_files import read_json_object, tokenizer_file
from stoker.engine.cpu_weights import CpuWeights
from stoker.engine.memory import ResolvedSettings
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import KvIdentity

_PROBES, _PROBE_BYTES = 16, 4096  # parts of each weight file that go into the digest


def read_hf_config(folder: Path) -> Mapping[str, Any]:
    """Return the model folder's config.json. Raises ModelFilesError if it cannot be read."""
    return read_json_object(folder / "config.json")


def model_digest(folder: Path, hf: Mapping[str, Any], seed: int | None) -> str:
    """Return the digest of config and weights.

    Only parts of the weight files are hashed. Hashing hundreds of GB would delay every start, and two models of the
    same shape differ nearly everywhere.
    """
    model = hashlib.sha256(json.dumps(hf, sort_keys=True).encode())
    model.update(repr(seed).encode())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        model.update(f"{file.name}:{size}".encode())
        with file.open("rb") as weights:
            for part in range(_PROBES):
                weights.seek(part * size // _PROBES)
                model.update(weights.read(_PROBE_BYTES))
    return model.hexdigest()[:16]


def kv_identity(
    folder: Path, hf: Mapping[str, Any], layout: KvLayout, seed: int | None, number_format: str
) -> KvIdentity:
    """Return the identity of the model's KV. Two engines share KV only if theirs are equal. `layout` is that of the whole
    model.

    The layout names the dtype of the KV. The model's own dtype is a part too: KV of the same layout has other values
    where the model computes in another dtype.
    """
    tokenizer = tokenizer_file(folder)
    vocabulary = hashlib.sha256(tokenizer.read_bytes() if tokenizer.exists() else b"")
    return KvIdentity(
        model=model_digest(folder, hf, seed),
        tokenizer=vocabulary.hexdigest()[:16],
        layout=layout.identity,
        dtype=number_format,
    )


def number_format(dtype: torch.dtype, resolved: ResolvedSettings, cpu_weights: CpuWeights) -> str:
    """Describe how the model computes. Engines that differ in it compute KV that differs in its last bits at least.

    The number of ranks is not a part of it, although it changes the last bits: engines of any two layouts share KV.
    """
    parts = [str(dtype).removeprefix("torch.")]
    if cpu_weights.format is not None:
        parts.append(f"weights {cpu_weights.format}")
    if resolved.exact:
        parts.append("exact")
    return ", ".join(parts)
