"""The Llama family: Llama 2 and 3, SmolLM2, and other models of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from stoker.kv.blocks.layout import KvGroup
from stoker.layers.decoder import Decoder
from stoker.layers.moe import MoeConfig
from stoker.models.dense import decoder_ignored, decoder_rules, read_config
from stoker.models.family import MODELS, Model, ModelShape


@MODELS.register("LlamaForCausalLM")
class Llama:
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llama": {},
        "llama-tied": {"tie_word_embeddings": True},
        "llama-bias": {"attention_bias": True, "mlp_bias": True},
        "llama3-rope": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    }
    _qk_norm = False

    def __init__(self, hf: Mapping[str, Any]) -> None:
        config = read_config(hf, qk_norm=self._qk_norm, moe=self._read_moe(hf))
        self._config = config
        self.shape = ModelShape(
            config.vocab_size,
            config.hidden_size,
            config.max_positions,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            config.num_heads,
            config.active_weights,
        )
        self.kv_groups: tuple[KvGroup, ...] = (KvGroup(config.num_layers, config.num_kv_heads, config.head_dim),)
        self.rules = decoder_rules(config)
        self.ignored = decoder_ignored(config)

    @staticmethod
    def _read_moe(hf: Mapping[str, Any]) -> MoeConfig | None:
        """Return the expert configuration. Families with experts override this."""
        return None

    def build(self, num_positions: int) -> Model:
        return Decoder(self._config, num_positions)
