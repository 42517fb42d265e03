"""Random EAGLE-3 heads on disk, in each public format, and an independent plain-torch reference of drafting with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 72, 4, 2, 16, 88  # of the head's layer; HIDDEN is also the tiny models'
VOCAB, LAYERS = 199, 8  # of the target model
DRAFT_VOCAB = 50
EPS, THETA = 1e-5, 5000.0

_LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": VOCAB, "num_hidden_layers": 1,
    "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB}


@dataclass(frozen=True)
class Format:
    """One public format: its config.json, how it names tensors, and what the values mean."""

    config: Mapping[str, Any]
    rename: Callable[[str], str] = lambda name: name
    taps: tuple[int, ...] = (2, 4, 5)  # the layers that are entered with a feature; by default 2, L // 2, L - 3
    draft_vocab: int | None = DRAFT_VOCAB  # None: the target model's whole vocabulary
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    bias: bool = False
    own_embedding: bool = True
    own_head: bool = True
    hidden: int = HIDDEN
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # known tensors that no engine needs


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _sglang(name: str) -> str:
    name = _midlayer(name)
    for number, word in enumerate(("low", "mid", "high")):
        name = name.replace(f"fc_norm.{number}.", f"aux_norm_{word}.")
    return f"model.{name}" if name.startswith(("midlayer", "embed", "norm", "fc")) else name


FORMATS = {
    "eagle": Format(
        _LAYER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB},
        _midlayer,
        own_embedding=False,
    ),
    "eagle, another hidden size": Format(
        _LAYER | _SPECFORGE | {"hidden_size": 48, "target_hidden_size": HIDDEN}, _midlayer, hidden=48
    ),
    "specforge": Format(
        _LAYER | _SPECFORGE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}},
        _midlayer,
        taps=(1, 4, 7),
    ),
    "specforge 3.1": Format(
        _LAYER | _SPECFORGE | {"fc_norm": True, "norm_output": True}, _midlayer, fc_norm=True, norm_output=True
    ),
    "sglang": Format(
        _LAYER | _SPECFORGE | {"use_aux_norm": True, "draft_vocab_size": None},
        _sglang,
        fc_norm=True,
        draft_vocab=None,
        own_head=False,
        own_embedding=False,
    ),
    "sglang, tied": Format(
        _LAYER | _SPECFORGE | {"tie_word_embeddings": True, "draft_vocab_size": VOCAB},
        _midlayer,
        draft_vocab=None,
        own_head=False,
    ),
    "vllm, norm before fc": Format(
        _LAYER
        | {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "model_type": "llama",
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_aux_hidden_state_layer_ids": [6, 1],
            "eagle_config": {"norm_before_fc": True},
            "attention_bias": True,
        },
        taps=(1, 6),
        norm_before_fc=True,
        bias=True,
    ),
    "speculators": Format(
        {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": DRAFT_VOCAB,
            "transformer_layer_config": _LAYER | {"model_type": "llama"},
            "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        },
        taps=(1, 4, 6),
        norm_before_residual=True,  # if it is not said
        extra={"verifier_norm.weight": torch.ones(HIDDEN)},
    ),
    "speculators, qwen3 layer": Format(
        {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": False,
            "norm_output": True,
            "transformer_layer_config": _LAYER | {"model_type": "qwen3"},
        },
        qk_norm=True,
        norm_output=True,
    ),
}


def make_tensors(form: Format, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights under the names of speculators, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5

    def norm(width: int) -> Tensor:
        return 1 + 0.1 * torch.randn(width, generator=generator, dtype=torch.float64)

    hidden, layer = form.hidden, "layers.0."
    tensors = {
        "fc.weight": normal(hidden, len(form.taps) * HIDDEN),
        "norm.weight": norm(hidden),
        f"{layer}input_layernorm.weight": norm(hidden),
        f"{layer}hidden_norm.weight": norm(hidden),
        f"{layer}post_attention_layernorm.weight": norm(hidden),
        f"{layer}self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": normal(hidden, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": normal(MLP, hidden),
        f"{layer}mlp.up_proj.weight": normal(MLP, hidden),
        f"{layer}mlp.down_proj.weight": normal(hidden, MLP),
    }
    if form.bias:
        for name in ("q", "k", "v", "o"):
            size = len(tensors[f"{layer}self_attn.{name}_proj.weight"])
            tensors[f"{layer}self_attn.{name}_proj.bias"] = normal(size)
    if form.qk_norm:
        tensors |= {f"{layer}self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in "qk"}
    if form.fc_norm:
        tensors |= {f"fc_norm.{number}.weight": norm(HIDDEN) for number in range(len(form.taps))}
    if form.norm_before_fc:
        tensors["input_norm.weight"] = norm(len(form.taps) * HIDDEN)
    if form.own_embedding:
        tensors["embed_tokens.weight"] = normal(VOCAB, hidden)
    if form.own_head:
        tensors["lm_head.weight"] = normal(form.draft_vocab or VOCAB, hidden)
    if form.draft_vocab is not None:
        ids = torch.randperm(VOCAB, generator=generator)[: form.draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(form.draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write_head(
    folder: Path, form: Format, tensors: Mapping[str, Tensor], changes: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint. `changes` are made to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**form.config, **(changes or {})}))
    named = {form.rename(name): tensor.contiguous() for name, tensor in {**tensors, **form.extra}.items()}
    save_file(named, folder / "model.safetensors")


def read_config_file(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


class PlainHead:
    """Drafts with a head, straight from its tensors: whole sequences, no KV cache, no fused weights."""

    def __init__(self, form: Format, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor) -> None:
        """`embedding` and `head` are the target model's."""
        self._form, self._tensors = form, tensors
        self._embedding = tensors.get("embed_tokens.weight", embedding)
        tied = self._embedding if form.config.get("tie_word_embeddings") else head
        self._head = tensors.get("lm_head.weight", tied)
        self.target_ids = torch.arange(len(self._head)) + tensors.get("d2t", torch.zeros((), dtype=torch.int64))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self._tensors[name]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """`hidden[i]` [tokens, hidden] enters layer i of the target model."""
        parts = [hidden[layer] for layer in self._form.taps]
        if self._form.fc_norm:
            parts = [self._norm(f"fc_norm.{number}.weight", part) for number, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        return self._linear("fc", self._norm("input_norm.weight", joined) if self._form.norm_before_fc else joined)

    def _rotate(self, x: Tensor) -> Tensor:
        """x [heads, tokens, head_dim], from position 0 on."""
        angles = torch.arange(x.shape[1])[:, None] * THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM).double()
        cos, sin = angles.cos(), angles.sin()
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def hidden(self, next_ids: Tensor, features: Tensor) -> Tensor:
        """The output of the layer at all positions, from the features there and the tokens that follow."""
        layer = "layers.0."
        normed = self._norm(f"{layer}hidden_norm.weight", features)
        both = torch.cat([self._norm(f"{layer}input_layernorm.weight", self._embedding[next_ids]), normed], -1)
        count = len(next_ids)

        def heads(name: str, number: int) -> Tensor:
            x = self._linear(f"{layer}self_attn.{name}_proj", both).view(count, number, HEAD_DIM).transpose(0, 1)
            return self._norm(f"{layer}self_attn.{name}_norm.weight", x) if self._form.qk_norm and name in "qk" else x

        query, key = self._rotate(heads("q", HEADS)), self._rotate(heads("k", KV_HEADS))
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (key, heads("v", KV_HEADS)))
        scores = query @ key.transpose(1, 2) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
        x = (normed if self._form.norm_before_residual else features) + self._linear(
            f"{layer}self_attn.o_proj", attended
        )
        y = self._norm(f"{layer}post_attention_layernorm.weight", x)
        gated = torch.nn.functional.silu(self._linear(f"{layer}mlp.gate_proj", y)) * self._linear(
            f"{layer}mlp.up_proj", y
        )
        return x + self._linear(f"{layer}mlp.down_proj", gated)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the target model's vocabulary; -inf for tokens that are never drafted."""
        found = torch.nn.functional.linear(self._norm("norm.weight", hidden), self._head)
        everything = torch.full((len(found), VOCAB), float("-inf"), dtype=found.dtype)
        everything[:, self.target_ids] = found
        return everything

    def draft(
        self, token_ids: list[int], features: Tensor, count: int, pick: Callable[[Tensor, int], int]
    ) -> tuple[list[int], Tensor]:
        """Return `count` drafts after `token_ids`, and the logits of each. `features` are those of all tokens but the
        last. `pick` gets logits and the position of the token that they are for."""
        ids, drafts, logits = list(token_ids), [], []
        for _ in range(count):
            hidden = self.hidden(torch.tensor(ids[1:]), features)[-1:]
            logits.append(self.logits(hidden)[0])
            drafts.append(pick(logits[-1], len(ids)))
            ids.append(drafts[-1])
            fed = self._norm("norm.weight", hidden) if self._form.norm_output else hidden
            features = torch.cat([features, fed])
        return drafts, torch.stack(logits)
