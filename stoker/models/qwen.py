"""The dense Qwen3 family: Llama's shape, with a norm on each head's q and k before the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from stoker.base.errors import ModelFilesError
from stoker.models.family import MODELS, field, list_field
from stoker.models.llama import Llama


@MODELS.register("Qwen3ForCausalLM")
class Qwen3(Llama):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qwen3": {},
        "qwen3-tied-wide-heads": {"tie_word_embeddings": True, "head_dim": 32},
    }
    _qk_norm = True

    def __init__(self, hf: Mapping[str, Any]) -> None:
        # Every layer attends to the whole context here. A model with sliding windows would give other answers, so it is
        # refused.
        has_other = any(kind != "full_attention" for kind in list_field(hf, "layer_types"))
        has_window = bool(hf.get("use_sliding_window")) and hf.get("sliding_window", True) is not None
        if has_other or (has_window and self._num_full_attention(hf) < field(hf, "num_hidden_layers", int)):
            raise ModelFilesError(
                "config.json: sliding-window attention is not supported (use_sliding_window, layer_types)"
            )
        super().__init__(hf)

    @staticmethod
    def _num_full_attention(hf: Mapping[str, Any]) -> int:
        """Return the number of leading layers without a window, where windows are configured."""
        found = hf.get("max_window_layers", 28)
        return found if isinstance(found, int) else 0
