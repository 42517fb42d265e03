"""EAGLE-3: a draft head of one decoder layer over the features of some layers of the target model.

The layer's attention sees the normed embedding of the next token beside the normed features. The head's vocabulary is a
part of the target model's: draft token d is the target model's token d + d2t[d].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from stoker.base.errors import ModelFilesError
from stoker.layers.batch import GroupInputs
from stoker.layers.embedding import Embedding
from stoker.layers.features import FeatureProjection, FeatureSum, Tap
from stoker.layers.linear import Linear, TiedLinear
from stoker.layers.norm import RMSNorm
from stoker.layers.packing import pack_layers
from stoker.layers.quant import all_plain
from stoker.layers.rope import Rope
from stoker.models.draft import DraftTarget
from stoker.models.eagle3_config import Eagle3Config


class Eagle3Features:
    """The features of one forward pass of the target model."""

    def __init__(self, total: FeatureSum, layers: Sequence[int]) -> None:
        self._total = total
        self.taps = [Tap(layer, partial(total.add, number)) for number, layer in enumerate(layers)]

    def value(self) -> Tensor:
        return self._total.value()


class Eagle3Head(nn.Module):
    """The head, built on torch's default device and in its default dtype. It is empty until weights are loaded.

    `has_embedding` and `has_head`: the checkpoint has its own. Otherwise the target model's are used.
    """

    def __init__(
        self, config: Eagle3Config, target: DraftTarget, num_positions: int, *, has_embedding: bool, has_head: bool
    ) -> None:
        super().__init__()
        layer = config.layer
        hidden_size, eps = layer.hidden_size, layer.norm_eps
        self.config, self.hidden_size = config, hidden_size
        self._target = [target]  # in a list, so that the module does not register the target model's parameters
        norms = {"norm_each": config.fc_norm, "norm_all": config.norm_before_fc}
        self.fc = FeatureProjection(config.target_hidden_size, len(config.taps), hidden_size, eps, **norms)
        self.embedding = Embedding(layer.vocab_size, hidden_size) if has_embedding else None
        self.embedding_norm = RMSNorm(hidden_size, eps)
        self.feature_norm = RMSNorm(hidden_size, eps)
        self.attention = config.attention.build(hidden_size, all_plain, "attention", 2 * hidden_size)
        self.mlp_norm = RMSNorm(hidden_size, eps)
        self.mlp = config.mlp.build(hidden_size, all_plain, "mlp")
        self.norm = RMSNorm(hidden_size, eps)
        self.head: Linear | TiedLinear | None = None
        if has_head:
            self.head = Linear(hidden_size, config.draft_vocab_size)
        elif layer.tie_embeddings and self.embedding is not None:
            self.head = TiedLinear(self.embedding)
        self.d2t: nn.Parameter | None = None
        if config.draft_vocab_size < layer.vocab_size:
            self.d2t = nn.Parameter(torch.empty(config.draft_vocab_size, dtype=torch.int64), requires_grad=False)
        self.rope = Rope(layer.rope, layer.rope_width, num_positions, self.norm.weight.device)

    def features(self) -> Eagle3Features:
        return Eagle3Features(self.fc.start(), self.config.taps)

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, where: GroupInputs) -> Tensor:
        """See DraftModel."""
        embedded = (self.embedding or self._target[0].embedding)(token_ids)
        normed = self.feature_norm(features)
        both = torch.cat([self.embedding_norm(embedded), normed], 1)
        x = normed if self.config.norm_before_residual else features.clone()  # the layer reuses the memory of x
        cos, sin = self.rope(positions)
        x = self.attention.add_attended(x, self.attention.project(both), where, 0, positions, cos, sin)
        hidden: Tensor = self.mlp(x, self.mlp_norm)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = (self.head or self._target[0].head)(hidden, self.norm)
        if self.d2t is None:
            return found
        everything = found.new_full((len(found), self.config.layer.vocab_size), float("-inf"))
        return everything.index_copy_(1, self.d2t, found)

    def feedback(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def share_embedding(self) -> None:
        """Drop the embedding if it is a copy of the target model's, as in many checkpoints. Call it after loading."""
        own, shared = self.embedding, dict(self._target[0].embedding.named_parameters()).get("weight")
        if own is None or isinstance(self.head, TiedLinear) or shared is None:
            return
        values = own.get_parameter("weight")
        if values.shape == shared.shape and values.dtype == shared.dtype and torch.equal(values, shared):
            self.embedding = None

    @property
    def bytes_per_token(self) -> int:
        """The features and a copy of them, the two inputs of the layer, its widest part, and the rotary angles."""
        widest = max(self.attention.width, self.mlp.width)
        angles = self.rope.bytes_per_token
        return (6 * self.config.layer.hidden_size + widest) * self.norm.weight.itemsize + angles

    @property
    def logits_bytes_per_row(self) -> int:
        return (self.config.draft_vocab_size + self.config.layer.vocab_size) * self.norm.weight.itemsize

    def pack(self) -> None:
        """Convert the weights to the layout of the kernels, and d2t to the target model's token ids. Raises
        ModelFilesError for tokens that the target model does not have."""
        if self.d2t is not None:
            self.d2t.data = _target_ids(self.d2t.data, self.config.layer.vocab_size)
        pack_layers(self)


def _target_ids(d2t: Tensor, vocab_size: int) -> Tensor:
    """Return the target model's token of each draft token."""
    if d2t.is_meta:
        return d2t
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten().tolist()
    if outside:
        raise ModelFilesError(
            f"tensor 'd2t': draft token {outside[0]} is the target model's token {int(ids[outside[0]])}, which has "
            f"{vocab_size}; {len(outside)} of {len(d2t)} are out of range"
        )
    if len(ids.unique()) < len(ids):
        raise ModelFilesError(f"tensor 'd2t': {len(ids)} draft tokens are only {len(ids.unique())} different tokens")
    return ids
