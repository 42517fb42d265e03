"""The contract of a draft model: a small model that guesses the next tokens from the target model's features.

The target model runs one step. It calls the taps of the step at the layers that the draft model names, and so fills the
step's features, [tokens, hidden]. The draft model then runs over the same tokens at the same positions, each with the
token that follows it. That fills its own KV group. From the last accepted token on, it continues alone: each guess and
its own output are the input of the next position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from stoker.kv.blocks.layout import KvGroup
from stoker.layers.batch import GroupInputs
from stoker.layers.features import Tap
from stoker.models.fill import Progress


class StepFeatures(Protocol):
    """The features of one forward pass of the target model."""

    @property
    def taps(self) -> Sequence[Tap]:
        """The taps, by ascending layer. The target model calls each once."""

    def value(self) -> Tensor:
        """Return the features [tokens, hidden], after all taps were called."""


class DraftTarget(Protocol):
    """What a draft model may share with its target model."""

    embedding: Any  # token ids [tokens] -> [tokens, hidden]
    head: Any  # hidden states [rows, hidden], RMSNorm -> logits [rows, vocab]
    norm: Any  # hidden states [tokens, hidden] -> the same, normed: the last norm, before the head
    rope: Any  # positions [tokens] -> cos and sin


class DraftModel(Protocol):
    """An nn.Module that drafts for one target model. Its parameters are empty until its weights are loaded."""

    hidden_size: int
    """The width of the features, and of the draft model's own hidden states."""

    def features(self) -> StepFeatures:
        """Return empty features, for one forward pass of the target model."""

    def __call__(self, token_ids: Tensor, features: Tensor, positions: Tensor, where: GroupInputs) -> Tensor:
        """Return the hidden states [tokens, hidden]. `token_ids` are the tokens that follow the positions, where the
        features are from. KV is written at the positions."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] of the target model's vocabulary; -inf for tokens that are never drafted"""

    def feedback(self, hidden: Tensor) -> Tensor:
        """Return the features of the next position while the draft model continues alone. [rows, hidden], both"""

    def pack(self) -> None:
        """Convert the weights to the layout of the kernels, once after loading."""

    @property
    def bytes_per_token(self) -> int:
        """Upper bound of the memory per token that drafting adds to a forward pass."""

    @property
    def logits_bytes_per_row(self) -> int:
        """Memory of `logits` per row, what it needs on the way included."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def buffers(self) -> Iterator[Tensor]: ...


class DraftCheckpoint(Protocol):
    """The files of a draft model, checked against the target model."""

    folder: Path
    taps: Sequence[int]  # the layers of the target model whose hidden states it needs: see Tap
    kv_group: KvGroup
    num_heads: int  # query heads of the draft model

    def build(self, target: DraftTarget, num_positions: int) -> DraftModel:
        """Build the draft model with empty parameters. `num_positions` is the longest context that will be served."""

    def load(self, model: Any, progress: Progress) -> None:
        """Load the weights into a model that `build` returned. Call its `pack` afterwards."""


@runtime_checkable
class PredictsMore(Protocol):
    """A model family whose checkpoints may have a layer for drafts (multi-token prediction)."""

    def open_prediction(self, folder: Path) -> DraftCheckpoint:
        """Return that layer's part of the checkpoint in `folder`. Raises ModelFilesError if there is none."""
