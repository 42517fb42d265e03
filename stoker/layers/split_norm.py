"""A norm of q and of k that covers the heads of all ranks. The ranks add up the squares of their heads, in one message."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class NormSplit:
    """The values of a token's q and k on all ranks together. Each head of k is on `k_copies` ranks."""

    q_width: int
    k_width: int
    k_copies: int


def norm_over_ranks(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, split: NormSplit, mesh: Mesh
) -> None:
    """Norm this rank's part of q and of k [tokens, width] in place."""
    # As in rms_norm_ref: the order of the additions changes the last bits of float64 only. A GPU has few units for it.
    wide = torch.float64 if q.device.type == "cpu" else torch.float32
    squares = torch.cat([part.to(wide).square().sum(-1, keepdim=True) for part in (q, k)], 1)
    totals = mesh.combine(squares)
    for part, weight, mean in (
        (q, q_weight, totals[:, :1] / split.q_width),
        (k, k_weight, totals[:, 1:] / (split.k_width * split.k_copies)),
    ):
        values = part if part.dtype == torch.float64 else part.float()
        scale = (mean + eps).rsqrt().to(values.dtype)
        part.copy_((values * scale).to(part.dtype) * weight)
