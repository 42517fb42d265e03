"""Attention of a prompt's first tokens over themselves, by cuDNN.  q [tokens, heads, head_dim]   k, v [tokens, kv_heads, head_dim]

A quarter faster than the kernel that reads pages (paged.py), but cuDNN takes a second to come up and 50 ms to plan for a new
length: so there are few lengths, planned for when there is nothing else to do.
"""

from __future__ import annotations

from threading import Thread

import torch
from torch import Tensor

from stoker.kernels.dispatch import overlaps

_LENGTHS = (2048, 4096, 6144, 8192)
_SHORT = 256  # any length brings cuDNN up
_PART_S = 0.1


def dense_attention(q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Each token sees itself and those before it."""
    batched = (part.transpose(0, 1)[None] for part in (q, key, value))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(*batched, None, False, 0.0, True, False, scale=scale)[0]
    return found[0].transpose(0, 1).contiguous()  # as it is, where cuDNN keeps the query's order


def has_dense(x: Tensor) -> bool:
    """Whether there is such a kernel, for values like these."""
    return overlaps(x) and x.dtype in (torch.bfloat16, torch.float16) and torch.backends.cudnn.is_available()


class DensePlans:
    """The lengths that are planned for. Plans belong to the thread that made them: all of this is for the engine's."""

    def __init__(self, like: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._like = like
        self._heads = num_heads, num_kv_heads, head_dim
        self._left = list(_LENGTHS) if has_dense(like) else []
        self._comes_up: Thread | None = None
        self.lengths: list[int] = []

    def plan_next(self) -> bool:
        """Whether more may be left. At first cuDNN has to come up, on a thread of its own: nobody waits for that longer than for
        other parts."""
        if not self._left:
            return False
        if self._comes_up is None:
            self._comes_up = Thread(target=self._plan, args=(_SHORT,), name="cudnn", daemon=True)
            self._comes_up.start()
        self._comes_up.join(_PART_S)
        if not self._comes_up.is_alive():
            self._plan(self._left[0])
            self.lengths.append(self._left.pop(0))
        return True

    def plan_all(self) -> None:
        while self._left:
            self._plan(self._left[0])
            self.lengths.append(self._left.pop(0))

    @torch.inference_mode()
    def _plan(self, num_tokens: int) -> None:
        """With k and v where a fused product leaves them."""
        num_heads, num_kv_heads, head_dim = self._heads
        heads = self._like.new_zeros(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        query = heads[:, :num_heads].contiguous()
        dense_attention(query, heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:], 1.0)
