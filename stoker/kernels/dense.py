"""Attention of a prompt's first tokens over themselves, by cuDNN.

q [tokens, heads, head_dim]   k, v [tokens, kv_heads, head_dim]

It is 25% faster than the kernel that reads pages (paged.py). But cuDNN takes a second to initialise and 50 ms to plan a
new length. So only a few lengths are supported, and they are planned while the engine is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread

import torch
from torch import Tensor

from stoker.kernels.dispatch import overlaps

_LENGTHS = (2048, 4096, 6144, 8192)
_SHORT = 256  # any length initialises cuDNN
_PART_S = 0.1


def dense_attention(q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention: each token attends to itself and to the tokens before it."""
    batched = (part.transpose(0, 1)[None] for part in (q, key, value))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(*batched, None, False, 0.0, True, False, scale=scale)[0]
    return found[0].transpose(0, 1).contiguous()  # no copy, where cuDNN keeps the query's layout


def has_dense(x: Tensor) -> bool:
    """Return True if cuDNN has a kernel for tensors like these."""
    return overlaps(x) and x.dtype in (torch.bfloat16, torch.float16) and torch.backends.cudnn.is_available()


class DensePlans:
    """The planned lengths. Plans belong to the thread that made them: only the engine's thread uses this class."""

    def __init__(self, like: Tensor, shapes: Sequence[tuple[int, int, int]], most: int | None = None) -> None:
        """`shapes` has the query heads, KV heads and head size of each KV group. `most` is the largest number of a
        prompt's first tokens whose attention is plain: without sinks, and in one window or chunk. None: any."""
        self._like = like
        self._shapes = list(dict.fromkeys(shapes))
        lengths = [length for length in _LENGTHS if most is None or length <= most]
        self._unplanned = lengths if has_dense(like) else []
        self._initialising: Thread | None = None
        self.lengths: list[int] = []

    def plan_next(self) -> bool:
        """Plan one more length and return True if more may be left. The first call initialises cuDNN on a thread of its
        own, so that no call takes longer than the others."""
        if not self._unplanned:
            return False
        if self._initialising is None:
            self._initialising = Thread(target=self._plan, args=(_SHORT,), name="cudnn", daemon=True)
            self._initialising.start()
        self._initialising.join(_PART_S)
        if not self._initialising.is_alive():
            self._plan(self._unplanned[0])
            self.lengths.append(self._unplanned.pop(0))
        return True

    def plan_all(self) -> None:
        while self._unplanned:
            self._plan(self._unplanned[0])
            self.lengths.append(self._unplanned.pop(0))

    @torch.inference_mode()
    def _plan(self, num_tokens: int) -> None:
        """Plan with k and v in the layout that a fused qkv matmul produces."""
        for num_heads, num_kv_heads, head_dim in self._shapes:
            heads = self._like.new_zeros(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
            query = heads[:, :num_heads].contiguous()
            dense_attention(query, heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:], 1.0)
