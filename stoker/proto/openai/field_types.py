"""Types of request fields, with the range that each of them allows."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

Ignored = Any  # accepted in every form, and never read
Refused = Any  # part of OpenAI's API but not supported: any value but null is answered with a 400 that names the field
# Part of OpenAI's API, and left out of account here. A value that asks for something is named in a response header
# (`not_honoured.py`).
NotHonoured = Any

MAX_TOP_LOGPROBS = 20
INT64_MAX = (1 << 63) - 1
INT32_MAX = (1 << 31) - 1

Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TokenLimit = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: no limit, as llama.cpp and LM Studio write it
CountOrZero = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
