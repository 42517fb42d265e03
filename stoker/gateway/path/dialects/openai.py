"""Any server that speaks OpenAI's API and nothing more: one leg, nothing added that OpenAI does not have."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, ClassVar

from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.dialects.foreign import run_alone
from stoker.gateway.path.legs import Legs


@DIALECTS.register("openai")
class OpenAi:
    resumes: ClassVar[bool] = False
    decodes_alone: ClassVar[bool] = True

    def run(self, call: Call, legs: Legs) -> Coroutine[Any, Any, None]:
        legs.end_prefill()
        return run_alone(call, legs, may_add=())
