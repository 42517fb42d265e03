"""Tiny checkpoints with 8-bit or 4-bit weights in their formats, and transformers' model of the dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.engine.llm import LLM
from stoker.sched.request import SamplingParams

# q has 192 rows and k 64: where they are stacked, blocks of 128 begin in the middle of others.
SHAPE = {
    "vocab_size": 199,
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FP8 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]


def fp8(weight: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and dequantised values, with one scale per block of rows x cols."""
    codes, scales, values = torch.empty(weight.shape, dtype=FP8), [], torch.empty_like(weight)
    for i in range(0, weight.shape[0], rows):
        for j in range(0, weight.shape[1], cols):
            place = (slice(i, i + rows), slice(j, j + cols))
            scale = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scale).to(FP8)
            values[place] = codes[place].float() * scale
            scales.append(scale)
    return codes, torch.stack(scales).view(-(-weight.shape[0] // rows), -1), values


def int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return words, scales and dequantised values: eight codes in a word, the first in its lowest bits, each stored
    plus 8."""
    groups = weight.view(len(weight), -1, group)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    values = (codes * scale.float()[..., None]).flatten(1)
    stored = (codes.flatten(1).numpy() + 8).astype(np.uint32)
    words = np.zeros((len(weight), weight.shape[1] // 8), np.uint32)
    for column in range(weight.shape[1]):
        words[:, column // 8] |= stored[:, column] << np.uint32(4 * (column % 8))
    return torch.from_numpy(words.view(np.int32)), scale, values


def store_block(name: str, weight: Tensor, suffix: str) -> tuple[Tensors, Tensor]:
    codes, scale, values = fp8(weight, 128, 128)
    return {f"{name}.weight": codes, f"{name}.{suffix}": scale}, values


def store_tensor(name: str, weight: Tensor, shape: tuple[int, ...]) -> tuple[Tensors, Tensor]:
    codes, scale, values = fp8(weight, *weight.shape)
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scale.view(shape)}
    return tensors | {f"{name}.input_scale": torch.full(shape, 0.5)}, values


def store_channel(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, _ = fp8(weight, 1, weight.shape[1])
    scale = scale.bfloat16()
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, codes.float() * scale.float()


def store_int4(name: str, weight: Tensor, group: int) -> tuple[Tensors, Tensor]:
    words, scale, values = int4(weight, group)
    shape = torch.tensor(weight.shape)
    return {f"{name}.weight_packed": words, f"{name}.weight_scale": scale, f"{name}.weight_shape": shape}, values


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    said = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return {**said, "ignore": ["lm_head"], "kv_cache_scheme": None, **more}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **more}


def ints(group: int, **more: Any) -> dict[str, Any]:
    described = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group",
        "group_size": group,
    }
    return {**described, **more}


DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], tuple[Tensors, Tensor]]]] = {
    "fp8 blocks": (BLOCKS, lambda name, weight: store_block(name, weight, "weight_scale_inv")),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda n, w: store_tensor(n, w, ())),
    "compressed tensor": (
        compressed("float-quantized", floats("tensor"), DYNAMIC),
        lambda n, w: store_tensor(n, w, (1,)),
    ),
    "compressed channel": (compressed("float-quantized", floats("channel"), DYNAMIC), store_channel),
    "compressed blocks": (
        compressed("float-quantized", floats("block", block_structure=[128, 128]), DYNAMIC),
        lambda name, weight: store_block(name, weight, "weight_scale"),
    ),
    "int4 groups of 32": (compressed("pack-quantized", ints(32), None), lambda n, w: store_int4(n, w, 32)),
}


def save(folder: Path, model: Any, said: dict[str, Any], tensors: Tensors) -> None:
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def make(folder: Path, scheme: str, is_quantised: Callable[[str], bool] = lambda name: True, **changes: Any) -> Any:
    """Write the quantised checkpoint, and return transformers' own model with the dequantised weights."""
    said, store = SCHEMES[scheme]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    tensors: Tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            module = name.removesuffix(".weight")
            if "_proj" in name and is_quantised(module):
                stored, values = store(module, parameter)
                parameter.copy_(values)
                tensors |= stored
            else:
                tensors[name] = parameter.clone()
    save(folder, model, {**said, **changes}, tensors)
    return model


# gate and up of an expert have 160 rows: each expert's blocks begin in the middle of those of the one before.
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "norm_topk_prob": True}


# The rotated rows of each head, and those of the shared key, are within one block of 128.
MLA = {
    "num_key_value_heads": 6,
    "head_dim": 64,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


SHAPES_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": MOE,
    "DeepseekV3ForCausalLM": MLA,
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "first_k_dense_replace": 1,
        "use_qk_norm": True, "attention_bias": True,
    },
    "MiniMaxM2ForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 160, "rotary_dim": 16},
}  # fmt: skip
_QUANTISED = ("_proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def make_moe(
    folder: Path,
    scheme: str,
    is_quantised: Callable[[str], bool] = lambda name: True,
    architecture: str = "Qwen3MoeForCausalLM",
    **changes: Any,
) -> Any:
    """The same with experts. Their tensors are separate only in files, so the dequantised model is read back from its
    own folder."""
    said, store = SCHEMES[scheme]
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    shape = {**SHAPE, **SHAPES_OF_EXPERTS[architecture]}
    model = model_class(model_class.config_class(**shape)).eval()
    with torch.no_grad():
        for values in model.state_dict().values():
            values.add_(torch.randn_like(values) * 0.05)
    meant_folder = folder / "meant"
    model.save_pretrained(meant_folder)
    meant, tensors = load_file(meant_folder / "model.safetensors"), {}
    for name, tensor in list(meant.items()):
        module = name.removesuffix(".weight")
        if name.endswith(_QUANTISED) and is_quantised(module):
            stored, meant[name] = store(module, tensor)
            tensors |= stored
        else:
            tensors[name] = tensor
    save_file(meant, meant_folder / "model.safetensors", {"format": "pt"})
    save(folder, model, {**said, **changes}, tensors)
    return model_class.from_pretrained(meant_folder, dtype=torch.float32).eval()


def worst_difference(llm: LLM, reference: Any, prompt: list[int]) -> float:
    """Return the largest difference of the log-probabilities of all tokens, after the prompt and after each token of a
    short answer."""
    vocab_size = SHAPE["vocab_size"]
    sampling = SamplingParams(temperature=0.0, num_logprobs=vocab_size)
    [answer] = llm.generate([prompt], sampling, max_new_tokens=5)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    found = torch.empty_like(expected)
    for step, row in zip(answer.logprobs, found, strict=True):
        row[torch.tensor(step.top_ids)] = torch.tensor(step.top_logprobs)
    return float((found - expected).abs().max())
