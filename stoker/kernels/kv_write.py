"""Write new KV into the paged cache.  src [tokens, heads, head_dim]   slots [rows, head_dim]   index [tokens * heads]"""

from __future__ import annotations

from torch import Tensor


def kv_write(src: Tensor, slots: Tensor, index: Tensor) -> None:
    slots.index_put_((index,), src.reshape(-1, src.shape[-1]))
