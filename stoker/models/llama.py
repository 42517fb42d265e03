"""The Llama family: Llama 2 and 3, SmolLM2, and other models of the same shape."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, ClassVar

from stoker.kv.blocks.layout import KvGroup
from stoker.layers.decoder import LayerConfig
from stoker.layers.moe import MoeConfig
from stoker.models.decoder_family import DecoderFamily
from stoker.models.dense import WeightNames, model_shape, read_attention, read_config, read_mlp, with_stored
from stoker.models.family import MODELS


@MODELS.register("LlamaForCausalLM")
class Llama(DecoderFamily):
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
        "llama-yarn": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    }
    _qk_norm = False

    def __init__(self, hf: Mapping[str, Any]) -> None:
        attention, moe = read_attention(hf, qk_norm=self._qk_norm), self._read_moe(hf)
        dense = LayerConfig(attention, read_mlp(hf))
        sparse = [] if moe is None else self._sparse_layers(hf)
        config = read_config(hf, lambda i: LayerConfig(attention, moe) if moe is not None and i in sparse else dense)
        self._config = config = with_stored(hf, config, WeightNames(config))
        self.shape = model_shape(config, attention)
        self.kv_groups = (KvGroup(len(config.layers), attention.num_kv_heads, attention.head_dim),)
        names = WeightNames(config)
        self.rules = names.rules()
        self.ignored = names.ignored()

    @staticmethod
    def _read_moe(hf: Mapping[str, Any]) -> MoeConfig | None:
        """Return the expert configuration. Families with experts override this."""
        return None

    @staticmethod
    def _sparse_layers(hf: Mapping[str, Any]) -> Container[int]:
        """Return the layers with experts; the others have a dense MLP."""
        return ()
