"""The dense Qwen3 family: Llama's shape, with a norm on each head's q and k before they are turned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.base.errors import ModelFilesError
from stoker.models.family import MODELS, field
from stoker.models.llama import Llama


@MODELS.register("Qwen3ForCausalLM")
class Qwen3(Llama):
    _qk_norm = True

    def __init__(self, hf: Mapping[str, Any]) -> None:
        # Every layer sees the whole context here: where the model's own would not, the answers would be others.
        kinds = set(hf.get("layer_types") or ()) - {"full_attention"}
        is_asked = bool(hf.get("use_sliding_window")) and hf.get("sliding_window", True) is not None
        if kinds or (is_asked and self._num_whole(hf) < field(hf, "num_hidden_layers", int)):
            raise ModelFilesError(
                "config.json: attention over a sliding window is not served (use_sliding_window, layer_types)"
            )
        super().__init__(hf)

    @staticmethod
    def _num_whole(hf: Mapping[str, Any]) -> int:
        """Leading layers that have no window where one is asked for."""
        found = hf.get("max_window_layers", 28)
        return found if isinstance(found, int) else 0
