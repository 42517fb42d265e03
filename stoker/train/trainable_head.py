"""An EAGLE-3 head for training: the computation of models/eagle3.py in differentiable torch, for whole sequences.

The names of the parameters are those of the public checkpoints (SpecForge, EAGLE).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from stoker.kernels.rope import rope_tables
from stoker.layers.rope import inverse_frequencies
from stoker.models.eagle3_config import Eagle3Config

_INIT_STD = 0.02


class TrainableNorm(nn.Module):
    """RMSNorm, computed in the dtype of its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt() * self.weight


class _Projection(nn.Module):
    """A matmul without a bias, with a small random weight."""

    def __init__(self, ins: int, outs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outs, ins).normal_(0.0, _INIT_STD, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class UnrolledAttention(nn.Module):
    """Attention of one unrolled step.

    Row p of step t stands for a draft at position p + t that continues from the true features of positions 0 to p. So it
    sees the keys of step 0 up to p, and of each later step its own row only.
    """

    def __init__(self, config: Eagle3Config, generator: torch.Generator) -> None:
        super().__init__()
        layer, heads = config.layer, config.grouped_attention
        self._shape = heads.num_heads, heads.num_kv_heads, heads.head_dim
        ins, q_size, kv_size = 2 * layer.hidden_size, *(n * heads.head_dim for n in self._shape[:2])
        self.q_proj = _Projection(ins, q_size, generator)
        self.k_proj = _Projection(ins, kv_size, generator)
        self.v_proj = _Projection(ins, kv_size, generator)
        self.o_proj = _Projection(q_size, layer.hidden_size, generator)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the attention's output: x [batch, rows, 2 * hidden], cos, sin [rows, head_dim] -> [batch, rows, hidden].

        `memory` has keys and values of the earlier steps. Those of this step are appended.
        """
        num_heads, num_kv_heads, head_dim = self._shape

        def heads(projected: Tensor, number: int) -> Tensor:
            return projected.view(*x.shape[:2], number, head_dim).transpose(1, 2)

        def rotated(part: Tensor) -> Tensor:
            return (part * cos + part.roll(head_dim // 2, -1) * sin).to(part.dtype)

        query = rotated(heads(self.q_proj(x), num_heads)) * head_dim**-0.5
        key = rotated(heads(self.k_proj(x), num_kv_heads))
        value = heads(self.v_proj(x), num_kv_heads)
        each = num_heads // num_kv_heads
        memory.append((key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)))
        first_key, first_value = memory[0]
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = [(query @ first_key.transpose(2, 3)).masked_fill(hidden, float("-inf"))]
        scores += [(query * later).sum(-1, keepdim=True) for later, _ in memory[1:]]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weights = torch.cat(scores, -1).softmax(-1, dtype=wide).to(value.dtype)
        attended = weights[..., : x.shape[1]] @ first_value
        for number, (_, later) in enumerate(memory[1:], x.shape[1]):
            attended = attended + weights[..., number : number + 1] * later
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class _Mlp(nn.Module):
    def __init__(self, hidden_size: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.gate_proj = _Projection(hidden_size, width, generator)
        self.up_proj = _Projection(hidden_size, width, generator)
        self.down_proj = _Projection(width, hidden_size, generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Midlayer(nn.Module):
    def __init__(self, config: Eagle3Config, generator: torch.Generator) -> None:
        super().__init__()
        layer = config.layer
        self.input_layernorm = TrainableNorm(layer.hidden_size, layer.norm_eps)
        self.hidden_norm = TrainableNorm(layer.hidden_size, layer.norm_eps)
        self.post_attention_layernorm = TrainableNorm(layer.hidden_size, layer.norm_eps)
        self.self_attn = UnrolledAttention(config, generator)
        self.mlp = _Mlp(layer.hidden_size, config.mlp.intermediate_size, generator)

    def forward(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, memory: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], -1)
        x = features + self.self_attn(both, cos, sin, memory)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainableHead(nn.Module):
    """The head on torch's default device and in its default dtype, with random weights that the generator gives."""

    def __init__(self, config: Eagle3Config, num_positions: int, generator: torch.Generator) -> None:
        super().__init__()
        layer = config.layer
        variants = (config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output)
        attention = config.grouped_attention
        assert not any((*variants, attention.qk_norm_eps, attention.bias, config.mlp.bias)), config
        self.config = config
        self.fc = _Projection(len(config.taps) * config.target_hidden_size, layer.hidden_size, generator)
        self.midlayer = _Midlayer(config, generator)
        self.norm = TrainableNorm(layer.hidden_size, layer.norm_eps)
        self.lm_head = _Projection(layer.hidden_size, config.draft_vocab_size, generator)
        cos, sin = rope_tables(
            inverse_frequencies(layer.rope, layer.rope_width), num_positions, layer.rope.table_scale, torch.float32
        )
        dtype = torch.get_default_dtype()
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    def features(self, states: Tensor) -> Tensor:
        """[..., taps * hidden] -> [..., hidden], in the dtype of the weights: the residual stream is not rounded"""
        found: Tensor = self.fc(states)
        return found.to(self.norm.weight.dtype)

    def step(self, embedded: Tensor, features: Tensor, number: int, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the hidden states of unrolled step `number`. embedded, features, result [batch, rows, hidden]"""
        rows = slice(number, number + features.shape[1])
        out: Tensor = self.midlayer(embedded, features, self.cos[rows], self.sin[rows], memory)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, draft vocab]"""
        found: Tensor = self.lm_head(self.norm(hidden))
        return found


def default_taps(num_layers: int) -> Sequence[int]:
    """Return the layers whose input is a feature: EAGLE-3's, or the first, middle and last of a model with few layers."""
    if num_layers >= 8:
        return (2, num_layers // 2, num_layers - 3)
    return sorted({1, (num_layers + 1) // 2, num_layers})
