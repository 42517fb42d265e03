"""DecoderFamily: what all families of decoders do alike. Registers nothing."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, Self

from stoker.base.errors import ConfigError
from stoker.kv.blocks.layout import KvGroup
from stoker.layers.decoder import Decoder, DecoderConfig, LayerConfig
from stoker.layers.moe import MoeConfig
from stoker.models.dense import WeightNames
from stoker.models.family import Model, ModelShape, Rule
from stoker.parallel.shard import WHOLE, Shard


class DecoderFamily:
    """The base of families whose model is a Decoder. Their `__init__` reads config.json and sets the attributes below."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]]
    _config: DecoderConfig
    shape: ModelShape
    kv_groups: tuple[KvGroup, ...]
    rules: list[Rule]
    ignored: frozenset[str]

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The layers of this part."""
        return self._config.layers

    def _names(self, config: DecoderConfig, shard: Shard = WHOLE) -> WeightNames:
        """Return the checkpoint's names. `config` is that of the whole model, also if a rank takes a part of it."""
        return WeightNames(config, shard=shard)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, MoeConfig) for layer in self.layers)

    def sharded(self, shard: Shard) -> Self:
        """Return a rank's part of the model. See ModelFamily."""
        part = self.sized(shard)
        part.ignored = self.ignored | {rule.source for rule in self.rules}  # the tensors of other ranks
        part.rules = self._names(self._config, shard).rules()
        return part

    def sized(self, shard: Shard) -> Self:
        """Return a rank's part of the model without the rules for loading it, which a large model has 200,000 of."""
        part = copy(self)
        part.rules = []
        part._config = config = self._config.sharded(shard)
        if shard.ep > 1 and not self.has_experts:
            raise ConfigError(f"ep={shard.ep}: the model has no experts to split; leave out --ep")
        attention: Any = config.layers[0].attention
        part.shape = replace(
            self.shape,
            num_layers=len(config.layers),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            active_weights=config.active_weights,
        )
        numbers = shard.layers_of(self.shape.num_layers)
        before = [sum(layer.group == i for layer in self.layers[: numbers.start]) for i in range(len(self.kv_groups))]
        counts = [sum(layer.group == i for layer in config.layers) for i in range(len(self.kv_groups))]
        if 0 in counts:
            kind = self.kv_groups[counts.index(0)].kind
            raise ConfigError(
                f"pp: the stage with layers {numbers.start} to {numbers.stop - 1} has none with attention of the kind {kind}; "
                "use fewer stages"
            )
        if shard.layers is not None:
            part.kv_groups = tuple(
                replace(group, held=range(first, first + count))
                for group, first, count in zip(self.kv_groups, before, counts, strict=True)
            )
        return part

    def build(self, num_positions: int) -> Model:
        """Build the model with empty parameters. See ModelFamily."""
        return Decoder(self._config, num_positions)
