"""Any server with the OpenAI API and no extensions: one leg, and no field that the gateway adds to OpenAI's."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, ClassVar

from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.accepted_fields import OPENAI_FIELDS
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.dialects.foreign import run_alone
from stoker.gateway.path.legs import Legs
from stoker.gateway.watch.load_probe import LoadProbe, NoLoadProbe


@DIALECTS.register("openai")
class OpenAi:
    """The dialect of a generic OpenAI-compatible server."""

    resumes: ClassVar[bool] = False
    decodes_alone: ClassVar[bool] = True
    speaks_messages: ClassVar[bool] = False
    load_probe: ClassVar[type[LoadProbe]] = NoLoadProbe

    def run(self, call: Call, legs: Legs) -> Coroutine[Any, Any, None]:
        legs.end_prefill()
        return run_alone(call, legs, OPENAI_FIELDS, may_add=(), has_running_usage=False)
