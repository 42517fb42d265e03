"""The dense Qwen3 family: Llama's shape, with a norm on each head's q and k before they are turned."""

from __future__ import annotations

from stoker.models.contract import MODELS
from stoker.models.llama import Llama


@MODELS.register("Qwen3ForCausalLM")
class Qwen3(Llama):
    _qk_norm = True
