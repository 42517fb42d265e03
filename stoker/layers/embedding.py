"""The embedding of tokens. With 8-bit matmuls, a quantised table stays as it is, and only the rows of a step are
dequantised: to the same values as the whole table would be."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.cpu_int8 import Int8Kernel
from stoker.layers.quant import PLAIN, Grouped, Int8Packing, Ready, Stored, StoredWeight, dequantise_grouped


class Embedding(StoredWeight):
    """The embeddings of `vocab_size` tokens, or of those of a rank: `held`. Other tokens get zeros there."""

    def __init__(self, vocab_size: int, width: int, stored: Stored = PLAIN, held: range | None = None) -> None:
        self._held = held if held is not None and len(held) < vocab_size else None
        super().__init__(width, (vocab_size if self._held is None else len(self._held),), stored)
        self._is_grouped = False

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        self._is_grouped = int8 is not None and isinstance(self._stored, Grouped)
        if not self._is_grouped:
            self.ready()

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._held is None:
            return self._look_up(token_ids)
        own = token_ids - self._held.start
        is_held = (own >= 0) & (own < len(self._held))
        return self._look_up(torch.where(is_held, own, 0)).mul_(is_held[:, None])

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if not self._is_grouped:
            return torch.nn.functional.embedding(token_ids, self.get_parameter(self._names[0]))
        return dequantise_grouped(*(self.get_parameter(name)[token_ids] for name in self._names))

    def as_matmul(self, int8: Int8Kernel | None) -> Ready:
        """Return the table as the weight of a matmul, after `pack`. The table is kept."""
        tensors = {name: self.get_parameter(name).data for name in self._names}
        if not self._is_grouped:
            return tensors[self._names[0]]
        packing = None if int8 is None else Int8Packing(int8, (1,))
        return self._stored.ready(tensors, self._parts, self.in_features, self._dtype, packing)
