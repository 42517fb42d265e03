"""DecoderFamily: what all families of decoders do alike. Registers nothing."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, Self

from stoker.base.errors import ConfigError
from stoker.kv.blocks.layout import KvGroup
from stoker.layers.decoder import Decoder, DecoderConfig
from stoker.models.dense import WeightNames
from stoker.models.family import Model, ModelShape, Rule
from stoker.parallel.shard import WHOLE, Shard


class DecoderFamily:
    """The base of families whose model is a Decoder. Their `__init__` reads config.json and sets the attributes below."""

    _config: DecoderConfig
    shape: ModelShape
    kv_groups: tuple[KvGroup, ...]
    rules: list[Rule]
    ignored: frozenset[str]

    def _names(self, config: DecoderConfig, shard: Shard = WHOLE) -> WeightNames:
        """Return the checkpoint's names. `config` is that of the whole model, also if a rank takes a part of it."""
        return WeightNames(config, shard=shard)

    def sharded(self, shard: Shard) -> Self:
        """Return a rank's part of the model. See ModelFamily."""
        part = copy(self)
        part._config = config = self._config.sharded(shard)
        attention: Any = config.layers[0].attention
        part.shape = replace(
            self.shape,
            num_layers=len(config.layers),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            active_weights=config.active_weights,
        )
        counts = [sum(layer.group == i for layer in config.layers) for i in range(len(self.kv_groups))]
        if 0 in counts:
            kind, numbers = self.kv_groups[counts.index(0)].kind, shard.layers_of(self.shape.num_layers)
            raise ConfigError(
                f"pp: the stage with layers {numbers.start} to {numbers.stop - 1} has none with attention of the kind {kind}; "
                "use fewer stages"
            )
        part.kv_groups = tuple(
            replace(group, num_layers=count) for group, count in zip(self.kv_groups, counts, strict=True)
        )
        part.ignored = self.ignored | {rule.source for rule in self.rules}  # the tensors of other ranks
        part.rules = self._names(self._config, shard).rules()
        return part

    def build(self, num_positions: int) -> Model:
        """Build the model with empty parameters. See ModelFamily."""
        return Decoder(self._config, num_positions)
