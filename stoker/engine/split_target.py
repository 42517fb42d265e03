"""SplitTarget: the parts of a target model that a draft model uses, where ranks split the model and each has the draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from stoker.parallel.mesh import ALONE, Mesh


class _WholeEmbedding:
    def __init__(self, part: Any, mesh: Mesh) -> None:
        self._part, self._mesh = part, mesh

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._mesh.combine(self._part(token_ids))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """A draft model cannot share the parameters: each rank has a part of them."""
        return iter(())


class SplitTarget:
    """See DraftTarget. All ranks of the stage call it in the same order."""

    def __init__(self, model: Any, mesh: Mesh, vocab_size: int) -> None:
        self._model, self._mesh, self._vocab_size = model, mesh, vocab_size
        self.embedding, self.norm, self.rope = _WholeEmbedding(model.embedding, mesh), model.norm, model.rope

    def head(self, hidden: Tensor, norm: Any) -> Tensor:
        return self._mesh.gather_logits(self._model.head(hidden, norm), self._vocab_size)


def draft_target(model: Any, mesh: Mesh, vocab_size: int) -> Any:
    """Return what a draft model uses of its target model."""
    return model if mesh is ALONE else SplitTarget(model, mesh, vocab_size)
