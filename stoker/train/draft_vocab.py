"""The draft vocabulary: the tokens that the model writes most often."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Draft token d is the model's token `ids[d]`. The ids ascend."""

    ids: Tensor  # [draft vocab] int64
    vocab_size: int  # of the model
    coverage: float  # share of the counted tokens that can be drafted

    @classmethod
    def from_tokens(cls, answers: Iterable[NDArray[np.int32]], size: int, vocab_size: int) -> DraftVocab:
        """Choose the `size` most frequent tokens; of equally frequent ones those with lower ids."""
        check_draft_vocab(size, vocab_size)
        counts = np.zeros(vocab_size, np.int64)
        for answer in answers:
            counts += np.bincount(answer, minlength=vocab_size)
        chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
        return cls(torch.from_numpy(chosen), vocab_size, float(counts[chosen].sum() / max(1, counts.sum())))

    @property
    def is_whole(self) -> bool:
        return len(self.ids) == self.vocab_size

    @property
    def d2t(self) -> Tensor:
        """[draft vocab]: what is added to a draft token to get the model's"""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """[vocab] bool: which of the model's tokens can be drafted"""
        return torch.zeros(self.vocab_size, dtype=torch.bool).index_fill_(0, self.ids, True)


def check_draft_vocab(size: int, vocab_size: int) -> None:
    """Raise ConfigError if a model does not have this many tokens."""
    if size > vocab_size:
        raise ConfigError(f"--draft-vocab {size} is more than the model's vocabulary of {vocab_size}; lower it")
