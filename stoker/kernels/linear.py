"""y = x W^T.  x [tokens, in]   weight [out, in]   ->  [tokens, out]

On a CPU the weight is packed once, at load, into the layout the matrix library wants: with few rows of x, packing it anew
in every call costs more than the product itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The row count that the packed layout is made for; measured best for 1 to 256 rows alike.
_PACK_ROWS = 16


def pack_weight(weight: Tensor) -> Tensor:
    """What `linear` takes: the weight itself, or the CPU library's own copy of it, which only `linear` can read."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)
