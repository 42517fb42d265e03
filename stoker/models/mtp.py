"""Multi-token prediction: a layer behind a model's own layers, in the same checkpoint, that guesses from its last hidden
states. The embedding, the head and the rotary tables are the model's; the checkpoint's copies of them are not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.weight_files import stored_tensors
from stoker.layers.batch import GroupInputs
from stoker.layers.decoder import DecoderConfig, DecoderLayer
from stoker.layers.features import Tap
from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm
from stoker.layers.packing import pack_layers
from stoker.layers.quant import PLAIN
from stoker.models.dense import Matmul, WeightNames, read_count, stored_matmuls
from stoker.models.draft import DraftTarget
from stoker.models.family import Rule
from stoker.models.fill import Progress
from stoker.models.quantisation import matmul_rules
from stoker.models.weights import load

_LAYER, _JOIN = "layers.0.", "join"
_COUNT = "num_nextn_predict_layers"


def prediction_names(hf: Mapping[str, Any], num_layers: int, prefix: str = "") -> frozenset[str]:
    """Return what the names of tensors in layers for drafts begin with. Such layers follow the model's own."""
    return frozenset(f"{prefix}model.layers.{num_layers + i}." for i in range(read_count(hf, _COUNT)))


class LastHidden:
    """The features of one forward pass: the normed hidden states that leave the target model's last layer."""

    def __init__(self, num_layers: int, norm: RMSNorm) -> None:
        self._norm = norm
        self._found: Tensor | None = None
        self.taps = [Tap(num_layers, self._take)]

    def _take(self, x: Tensor) -> None:
        self._found = self._norm(x)

    def value(self) -> Tensor:
        assert self._found is not None, "no hidden states were taken"
        return self._found


class MtpHead(nn.Module):
    """The layer, built on torch's default device and in its default dtype. It is empty until weights are loaded."""

    def __init__(self, config: DecoderConfig, num_target_layers: int, target: DraftTarget) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.norm_eps
        self._target = [target]  # in a list, so that the module does not register the target model's parameters
        self._num_target_layers, self.hidden_size, self._vocab_size = num_target_layers, hidden_size, config.vocab_size
        self.embedding_norm = RMSNorm(hidden_size, eps)
        self.feature_norm = RMSNorm(hidden_size, eps)
        self.join = Linear(2 * hidden_size, hidden_size, stored=config.stored_as(_JOIN))
        self.layers = nn.ModuleList([DecoderLayer(config, 0)])
        self.norm = RMSNorm(hidden_size, eps)

    def features(self) -> LastHidden:
        return LastHidden(self._num_target_layers, self._target[0].norm)

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, where: GroupInputs) -> Tensor:
        """See DraftModel."""
        target = self._target[0]
        embedded = target.embedding(token_ids)
        x = self.join.plain(torch.cat([self.embedding_norm(embedded), self.feature_norm(features)], 1))
        cos, sin = target.rope(positions)
        hidden: Tensor = self.layers[0](x, where, 0, positions, cos, sin)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self._target[0].head(hidden, self.norm)
        return found

    def feedback(self, hidden: Tensor) -> Tensor:
        """Return the normed output, in the place of the target model's normed hidden states."""
        return self.norm(hidden)

    @property
    def bytes_per_token(self) -> int:
        """The features, the two inputs of the layer apart and joined, and its widest part."""
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return (8 * self.hidden_size + layer.width) * self.norm.weight.itemsize

    @property
    def logits_bytes_per_row(self) -> int:
        return self._vocab_size * self.norm.weight.itemsize

    def pack(self) -> None:
        """Convert the weights to the layout of the kernels."""
        pack_layers(self)


class MtpCheckpoint:
    """The layer's part of a checkpoint. `config` is the target model's, and `names` are its weights' names. The layer has
    the shape of the target model's last one. Raises ModelFilesError if the files do not have it."""

    def __init__(self, hf: Mapping[str, Any], folder: Path, config: DecoderConfig, names: WeightNames) -> None:
        if not read_count(hf, _COUNT):
            raise ModelFilesError(
                f"{folder}: config.json has no layer for drafts ({_COUNT} is 0); leave out the drafter 'mtp'"
            )
        self.folder, self._num_layers = folder, len(config.layers)
        self.taps: Sequence[int] = (self._num_layers,)
        self._src, stored = f"{names.prefix}model.layers.{self._num_layers}.", stored_tensors(folder)
        if f"{self._src}eh_proj.weight" not in stored:
            raise ModelFilesError(
                f"{folder}: the checkpoint has no layer for drafts ({self._src}eh_proj.weight); leave out the drafter 'mtp'"
            )
        # Checkpoints with 8-bit weights have this matmul with or without scales.
        scales = (f"{self._src}eh_proj.{name}" for name in ("weight_scale_inv", "weight_scale"))
        is_join_plain = not any(name in stored for name in scales)
        self._names, self._layer = names, config.layers[-1]
        alone = replace(config, layers=(self._layer,))
        self._config = replace(alone, stored=stored_matmuls(hf, self._matmuls(alone.hidden_size), names.prefix))
        if is_join_plain:
            self._config = replace(self._config, stored={**self._config.stored, _JOIN: PLAIN})
        attention: Any = self._layer.attention
        self.kv_group, self.num_heads = attention.kv_group(1), attention.num_heads

    def _matmuls(self, hidden_size: int) -> Iterator[Matmul]:
        yield Matmul(_JOIN, {f"{self._src}eh_proj": hidden_size}, 2 * hidden_size)
        yield from self._names.attention_matmuls(self._layer.attention, self._src, _LAYER)
        yield from self._names.mlp_matmuls(self._layer.mlp, self._src, _LAYER)

    def build(self, target: DraftTarget, num_positions: int) -> MtpHead:
        """Build the layer on torch's default device and in its default dtype, with empty parameters."""
        return MtpHead(self._config, self._num_layers, target)

    def load(self, head: MtpHead, progress: Progress) -> None:
        """Load the weights into a layer that `build` returned. Call its `pack` afterwards. The names of the whole
        checkpoint are checked when the target model is loaded."""
        config, src = self._config, self._src
        rules = [
            Rule(f"{src}enorm.weight", "embedding_norm.weight"),
            Rule(f"{src}hnorm.weight", "feature_norm.weight"),
            Rule(f"{src}shared_head.norm.weight", "norm.weight"),
        ]
        for matmul in self._matmuls(config.hidden_size):
            sources, parts = list(matmul.parts), list(matmul.parts.values())
            stored = config.stored_as(matmul.target)
            rules += matmul_rules(stored, sources, matmul.target, parts, matmul.num_ins, matmul.bias)
        rules += self._names.layer_rules(config.layers[0], src, _LAYER)
        known = {rule.source for rule in rules}
        others = frozenset(name for name in stored_tensors(self.folder) if name not in known)
        load(head, rules, others, self.folder, progress)
