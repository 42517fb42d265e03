"""Random EAGLE-3 heads on disk, in each public format, and an independent plain-torch reference of drafting with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stoker.kv.blocks.layout import KvGroup

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 72, 4, 2, 16, 88  # of the head's layer; HIDDEN is also the tiny models'
VOCAB, LAYERS = 199, 8  # of the target model
DRAFT_VOCAB = 50
EPS, THETA = 1e-5, 5000.0

_LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": VOCAB, "num_hidden_layers": 1,
    "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB}


@dataclass(frozen=True)
class Latent:
    """The sizes of a head's latent attention."""

    q_rank: int | None
    interleaved: bool  # neighbouring values are rotated together
    latent: int = 32
    nope: int = 12
    rope: int = 16
    value: int = 10

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "model_type": "deepseek_v3", "num_key_value_heads": HEADS, "head_dim": None, "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.latent, "qk_nope_head_dim": self.nope, "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value, "n_routed_experts": 256, "num_experts_per_tok": 8,
        }  # fmt: skip

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of the projections."""
        q_size = HEADS * (self.nope + self.rope)
        low = {"q_a_proj": (self.q_rank, 2 * hidden), "q_b_proj": (q_size, self.q_rank)} if self.q_rank else {}
        return (low or {"q_proj": (q_size, 2 * hidden)}) | {
            "kv_a_proj_with_mqa": (self.latent + self.rope, 2 * hidden),
            "kv_b_proj": (HEADS * (self.nope + self.value), self.latent),
            "o_proj": (hidden, HEADS * self.value),
        }

    @property
    def norms(self) -> dict[str, int]:
        return {"kv_a_layernorm": self.latent} | ({"q_a_layernorm": self.q_rank} if self.q_rank else {})


_LOW_RANK, _HALVES = Latent(20, True), Latent(None, False)


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
    latent: Latent | None = None  # None: grouped-query attention
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # known tensors that no engine needs

    @property
    def kv_group(self) -> KvGroup:
        if self.latent is None:
            return KvGroup(1, KV_HEADS, HEAD_DIM)
        return KvGroup(1, 1, self.latent.latent + self.latent.rope, "latent", wide=self.latent.rope)


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _torchspec(name: str) -> str:
    return _midlayer(name).replace("kv_a_proj_with_mqa", "kv_a_proj")


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
    "vllm, MLA": Format(
        _LAYER
        | _LOW_RANK.fields
        | {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "draft_vocab_size": DRAFT_VOCAB,
            "fc_norm": True,
            "norm_output": True,
            "rope_scaling": _YARN,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
        },
        _midlayer,
        taps=(1, 4, 7),
        fc_norm=True,
        norm_output=True,
        own_embedding=False,
        latent=_LOW_RANK,
    ),
    "torchspec, MLA": Format(
        _LAYER | _HALVES.fields | {"architectures": ["DeepSeekForCausalLMEagle3"]},
        _torchspec,
        draft_vocab=None,
        latent=_HALVES,
    ),
}


def _attention_shapes(form: Format) -> dict[str, tuple[int, int]]:
    if form.latent is not None:
        return form.latent.shapes(form.hidden)
    sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    shapes = {name: (size, 2 * form.hidden) for name, size in sizes.items()}
    return shapes | {"o_proj": (form.hidden, HEADS * HEAD_DIM)}


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
        **{f"{layer}self_attn.{name}.weight": normal(*shape) for name, shape in _attention_shapes(form).items()},
        f"{layer}mlp.gate_proj.weight": normal(MLP, hidden),
        f"{layer}mlp.up_proj.weight": normal(MLP, hidden),
        f"{layer}mlp.down_proj.weight": normal(hidden, MLP),
    }
    if form.bias:
        for name in ("q", "k", "v", "o"):
            size = len(tensors[f"{layer}self_attn.{name}_proj.weight"])
            tensors[f"{layer}self_attn.{name}_proj.bias"] = normal(size)
    if form.latent is not None:
        tensors |= {f"{layer}self_attn.{name}.weight": norm(size) for name, size in form.latent.norms.items()}
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


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[heads, tokens, width] -> [tokens, heads * width]"""
    count = query.shape[1]
    scores = query @ key.transpose(1, 2) * scale
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)


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

    def _project(self, name: str, x: Tensor, number: int) -> Tensor:
        """[heads, tokens, width]"""
        return self._linear(f"layers.0.self_attn.{name}", x).view(len(x), number, -1).transpose(0, 1)

    def _grouped_heads(self, both: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return q, k and v of each head, and the scale of the scores."""
        query, key, value = (
            self._project(f"{x}_proj", both, number) for x, number in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        if self._form.qk_norm:
            query = self._norm("layers.0.self_attn.q_norm.weight", query)
            key = self._norm("layers.0.self_attn.k_norm.weight", key)
        each = HEADS // KV_HEADS
        key, value = self._rotate(key).repeat_interleave(each, 0), value.repeat_interleave(each, 0)
        return self._rotate(query), key, value, HEAD_DIM**-0.5

    def _latent_heads(self, both: Tensor, latent: Latent) -> tuple[Tensor, Tensor, Tensor, float]:
        own, scale = "layers.0.self_attn.", (latent.nope + latent.rope) ** -0.5
        if latent.q_rank is None:
            query = self._project("q_proj", both, HEADS)
        else:
            low = self._norm(f"{own}q_a_layernorm.weight", self._linear(f"{own}q_a_proj", both))
            query = self._project("q_b_proj", low, HEADS)
        compressed, turned = self._linear(f"{own}kv_a_proj_with_mqa", both).split([latent.latent, latent.rope], -1)
        expanded = self._project("kv_b_proj", self._norm(f"{own}kv_a_layernorm.weight", compressed), HEADS)
        key, value = expanded.split([latent.nope, latent.value], -1)
        frequencies = THETA ** -(torch.arange(0, latent.rope, 2) / latent.rope).double()
        if scaling := self._form.config.get("rope_scaling"):
            sizes = {"qk_rope_head_dim": latent.rope, "head_dim": latent.rope, "max_position_embeddings": 64}
            yarn = DeepseekV3Config(rope_parameters={**scaling, "rope_type": "yarn", "rope_theta": THETA}, **sizes)
            frequencies, table_scale = ROPE_INIT_FUNCTIONS["yarn"](yarn, torch.device("cpu"))
            assert table_scale == 1.0
            scale *= (0.1 * math.log(scaling["factor"]) + 1.0) ** 2

        def rotate(x: Tensor) -> Tensor:
            """x [heads, tokens, rope], from position 0 on."""
            angles = torch.arange(x.shape[1])[:, None] * frequencies
            low, high = (x[..., ::2], x[..., 1::2]) if latent.interleaved else x.chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

        query = torch.cat([query[..., : latent.nope], rotate(query[..., latent.nope :])], -1)
        return query, torch.cat([key, rotate(turned[None]).expand(HEADS, -1, -1)], -1), value, scale

    def hidden(self, next_ids: Tensor, features: Tensor) -> Tensor:
        """The output of the layer at all positions, from the features there and the tokens that follow."""
        layer = "layers.0."
        normed = self._norm(f"{layer}hidden_norm.weight", features)
        both = torch.cat([self._norm(f"{layer}input_layernorm.weight", self._embedding[next_ids]), normed], -1)
        parts = self._latent_heads(both, self._form.latent) if self._form.latent else self._grouped_heads(both)
        attended = _attend(*parts)
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
