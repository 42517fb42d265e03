"""The Llama family: Llama 2 and 3, SmolLM2, and others of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.layers.decoder import Decoder
from stoker.layers.moe import MoeConfig
from stoker.models.dense import decoder_ignored, decoder_rules, read_config
from stoker.models.family import MODELS, Model, ModelShape


@MODELS.register("LlamaForCausalLM")
class Llama:
    _qk_norm = False

    def __init__(self, hf: Mapping[str, Any]) -> None:
        config = read_config(hf, qk_norm=self._qk_norm, moe=self._read_moe(hf))
        self._config = config
        self.shape = ModelShape(
            config.vocab_size,
            config.max_positions,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            config.num_heads,
            config.active_weights,
        )
        self.rules = decoder_rules(config)
        self.ignored = decoder_ignored(config)

    @staticmethod
    def _read_moe(hf: Mapping[str, Any]) -> MoeConfig | None:
        """For families with experts in the place of some layers' MLP."""
        return None

    def build(self, num_positions: int) -> Model:
        return Decoder(self._config, num_positions)
