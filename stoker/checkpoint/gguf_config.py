"""Convert GGUF metadata to config.json and generation_config.json, for the supported architectures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.gguf_file import GgufFile, damaged

ROPE_FREQS = "rope_freqs.weight"

# Rope parameters of Llama 3.1 to 3.3. A GGUF file holds only the factors computed from them, in rope_freqs.weight.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class GgufArchitecture:
    """How a GGUF architecture differs from the others."""

    hf_class: str
    model_type: str
    permutes_rope: bool  # llama.cpp stores the rows of q and k in the order of interleaved rope
    head_norms: bool  # has a norm on each head of q and k


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", permutes_rope=True, head_norms=False),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", permutes_rope=False, head_norms=True),
}


@dataclass(frozen=True)
class GgufShape:
    """The sizes that decide a model's tensor names, shapes and row orders."""

    architecture: GgufArchitecture
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab: int
    tied: bool


def read_shape(file: GgufFile) -> GgufShape:
    name = file.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ModelFilesError(
            f"{file.path}: its architecture {name!r} is not supported in GGUF files, only {', '.join(ARCHITECTURES)}. "
            "Use the model's original folder with safetensors"
        )
    if (file.find("split.count", int) or 1) > 1:
        raise ModelFilesError(f"{file.path} is one of {file.find('split.count', int)} parts: merge them into one file")
    if "token_embd.weight" not in file.tensors:
        raise damaged(file.path, "it has no tensor token_embd.weight")
    hidden = file.get(f"{name}.embedding_length", int)
    num_heads = file.get(f"{name}.attention.head_count", int)
    if num_heads < 1:
        raise damaged(file.path, f"{name}.attention.head_count is {num_heads}")
    num_layers = file.get(f"{name}.block_count", int)
    if num_layers > len(file.tensors):
        raise damaged(file.path, f"it has {len(file.tensors)} tensors, but its metadata says {num_layers} layers")
    head_size = file.find(f"{name}.attention.key_length", int) or hidden // num_heads
    if head_size % 2:
        raise damaged(file.path, f"its head size {head_size} is odd, but rope needs an even one")
    for key in ("rope.dimension_count", "attention.value_length"):
        if (file.find(f"{name}.{key}", int) or head_size) != head_size:
            raise ModelFilesError(
                f"{file.path}: {name}.{key} is {file.metadata[f'{name}.{key}']}, but the head size is {head_size}: models in which "
                "these differ are not supported"
            )
    return GgufShape(
        architecture=ARCHITECTURES[name],
        num_layers=num_layers,
        hidden=hidden,
        intermediate=file.get(f"{name}.feed_forward_length", int),
        num_heads=num_heads,
        num_kv_heads=file.find(f"{name}.attention.head_count_kv", int) or num_heads,
        head_size=head_size,
        vocab=file.tensors["token_embd.weight"].shape[0],
        tied="output.weight" not in file.tensors,
    )


def model_config(file: GgufFile, shape: GgufShape) -> dict[str, Any]:
    name = shape.architecture.model_type
    rope = _rope(file, shape)
    config = {
        "architectures": [shape.architecture.hf_class],
        "model_type": name,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": file.get(f"{name}.context_length", int),
        "rms_norm_eps": _shortest(file.get(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": {key: rope[key] for key in rope if key != "rope_theta"} if len(rope) > 2 else None,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **generation_config(file),
    }
    eos = config["eos_token_id"]
    return config | {"eos_token_id": eos[0] if isinstance(eos, list) else eos}


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the ids of the BOS, EOS and padding tokens. A chat model may have several EOS tokens."""
    ends = [file.find(f"tokenizer.ggml.{kind}_token_id", int) for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": file.find("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
        "pad_token_id": file.find("tokenizer.ggml.padding_token_id", int),
    }


def _rope(file: GgufFile, shape: GgufShape) -> dict[str, Any]:
    prefix = f"{shape.architecture.model_type}.rope"
    theta = _shortest(file.find(f"{prefix}.freq_base", float) or 10000.0)
    # llama.cpp treats a missing type as linear. Older files have scale_linear.
    scaling = file.find(f"{prefix}.scaling.type", str) or "linear"
    factor = file.find(f"{prefix}.scaling.factor", float) or file.find(f"{prefix}.scale_linear", float) or 1.0
    for key in ("attn_factor", "yarn_attn_factor"):
        if (file.find(f"{prefix}.scaling.{key}", float) or 1.0) != 1.0:
            raise ModelFilesError(f"{file.path}: {prefix}.scaling.{key} is not supported")
    rope = {"rope_type": "default", "rope_theta": theta}
    if ROPE_FREQS in file.tensors:
        rope = _llama3_rope(file, shape, theta)
    if scaling == "none" or factor == 1.0:
        return rope
    if scaling == "linear" and rope["rope_type"] == "default":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    # Checked before the conversion, which takes minutes and much disk space: the engine would refuse the result.
    both = f" together with {ROPE_FREQS}" if rope["rope_type"] != "default" else ""
    raise ModelFilesError(f"{file.path}: rope scaling {scaling!r}{both} is not supported, only linear and Llama 3's")


def _llama3_rope(file: GgufFile, shape: GgufShape, theta: float) -> dict[str, Any]:
    tensor = file.tensors[ROPE_FREQS]
    divisors = file.rows(tensor, np.arange(tensor.shape[0]))
    if np.all(divisors == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(divisors.max()), **_LLAMA3_ROPE}
    expected = llama3_divisors(rope, shape.head_size)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelFilesError(
            f"{file.path}: {ROPE_FREQS} does not hold Llama 3's rope scaling, which is the only one supported"
        )
    return rope


def llama3_divisors(rope: dict[str, Any], head_size: int) -> npt.NDArray[np.float64]:
    """Return the divisor of each rope frequency in Llama 3: 1 for high ones, `factor` for low ones, smooth in between."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_size, 2) / head_size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / rope["factor"] + smooth))


def _shortest(value: float) -> float:
    """Return the shortest decimal of a float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))
