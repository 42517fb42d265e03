"""Features of a target model for a draft model: one linear layer over the hidden states of several layers.

The linear layer of all hidden states together is the sum of one for each. So the features are added up while the target
model runs, and no hidden states are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.kernels.cpu_int8 import Int8Kernel
from stoker.kernels.linear import PackedWeight, Weight, add_linear, linear, pack_weight
from stoker.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Tap:
    """`take` gets the hidden states [tokens, hidden] that enter layer `layer` of a model. With the number of layers, it
    gets those that leave the last one. It must not keep them: the next layer reuses their memory."""

    layer: int
    take: Callable[[Tensor], None]


class FeatureProjection(nn.Module):
    """A linear layer from `count` hidden states of `in_features` values each.

    `norm_each`: each hidden state has a norm of its own. `norm_all`: one norm covers all of them together.
    """

    def __init__(
        self, in_features: int, count: int, out_features: int, eps: float, *, norm_each: bool, norm_all: bool
    ) -> None:
        super().__init__()
        self.in_features, self.count, self._eps = in_features, count, eps
        self.weight = nn.Parameter(torch.empty(out_features, count * in_features), requires_grad=False)
        self.norms = nn.ModuleList(RMSNorm(in_features, eps) for _ in range(count if norm_each else 0))
        self.joint_norm = RMSNorm(count * in_features, eps) if norm_all else None
        self._parts: list[Weight] = []

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Split the weight into one for each hidden state, once after loading."""
        parts = self.weight.data.view(len(self.weight), self.count, self.in_features).transpose(0, 1)
        self.weight.data = parts.contiguous()
        self._parts = [pack_weight(part) for part in self.weight.data]
        if any(isinstance(part, PackedWeight) for part in self._parts):
            self.weight.data = torch.empty(0)

    def start(self) -> FeatureSum:
        """Return an empty sum for one forward pass of the target model."""
        assert self._parts, "pack() comes first"
        return FeatureSum(self)

    def prepare(self, number: int, x: Tensor) -> Tensor:
        """Return the input of the linear layer's part `number`, from the hidden states that belong to it."""
        if self.norms:
            normed: Tensor = self.norms[number](x)
            return normed
        if self.joint_norm is not None:
            return x * self.joint_norm.weight[number * self.in_features :][: self.in_features]
        return x

    def add(self, number: int, x: Tensor, total: Tensor | None) -> Tensor:
        """Return total + part `number` of the linear layer. The memory of `total` is reused."""
        weight = self._parts[number]
        return linear(x, weight) if total is None else add_linear(total, x, weight)

    def scale(self, total: Tensor, squares: Tensor) -> Tensor:
        """Divide by the root mean square of all hidden states together, which is known only at the end. `squares`
        [tokens, 1] are the sums of their squares."""
        mean = squares / (self.count * self.in_features)
        return (total * (mean + self._eps).rsqrt()).to(total.dtype)


class FeatureSum:
    """The features of one forward pass, [tokens, out_features]."""

    def __init__(self, projection: FeatureProjection) -> None:
        self._projection = projection
        self._total: Tensor | None = None
        self._squares: Tensor | None = None  # for a norm over all hidden states: the sums of their squares

    def add(self, number: int, x: Tensor) -> None:
        """Add the hidden states [tokens, in_features] that belong to part `number`."""
        projection = self._projection
        if projection.joint_norm is not None:
            wide = x if x.dtype == torch.float64 else x.float()
            squares = wide.square().sum(-1, keepdim=True)
            self._squares = squares if self._squares is None else self._squares + squares
        self._total = projection.add(number, projection.prepare(number, x), self._total)

    def value(self) -> Tensor:
        """Return the features."""
        assert self._total is not None, "no hidden states were added"
        return self._total if self._squares is None else self._projection.scale(self._total, self._squares)
