"""Types of request fields, with the range that each of them allows."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

Ignored = Any  # accepted in every form, and never read
Refused = Any  # part of OpenAI's API but not supported: any value but null is answered with a 400 that names the field

MAX_TOP_LOGPROBS = 20
INT64_MAX = (1 << 63) - 1
INT32_MAX = (1 << 31) - 1

Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
